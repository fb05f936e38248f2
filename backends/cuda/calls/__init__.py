"""What more than one rule needs: products, and the work of experts without counts on the host."""
