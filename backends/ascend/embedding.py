"""Ascend rule of `ops.Embedding`."""

import torch


def rule(tokens: torch.Tensor, table: torch.Tensor, *, vocabulary: int, ranks: int, rank: int) -> tuple[torch.Tensor]:
    """Look every token up, then zero those that other ranks hold."""
    first = rank * table.shape[0]
    elsewhere = (tokens < first) | (tokens >= min(first + table.shape[0], vocabulary))
    rows = torch.index_select(table, 0, (tokens - first).masked_fill(elsewhere, 0))
    return (rows.masked_fill(elsewhere.unsqueeze(1), 0),)
