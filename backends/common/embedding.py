"""Rule of `ops.Embedding`."""

import torch

from mla_fx.backends.device import Run
from mla_fx.effects import Group


def rule(tokens: torch.Tensor, table: torch.Tensor, *, run: Run, vocabulary: int, group: Group) -> tuple[torch.Tensor]:
    """Look every token up, those of other ranks as some row, then zero theirs: selecting rows would be a wait."""
    local = tokens - run.rank * table.shape[0]
    held = min(table.shape[0], vocabulary - run.rank * table.shape[0])  # rows that are not padding
    if held < 1:
        return (table.new_zeros((tokens.shape[0], table.shape[1])),)
    near = local.clamp(0, held - 1)
    rows = torch.index_select(table, 0, near)
    return (rows.masked_fill_((local != near).unsqueeze(1), 0),)
