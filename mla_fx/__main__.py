"""`python -m mla_fx`: the command line, as `mla-fx` is, for torchrun and for checkouts that are not installed."""

import sys

from mla_fx.cli import main

if __name__ == "__main__":
    sys.exit(main())
