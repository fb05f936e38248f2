"""Reference rule of `ops.Embedding`."""

import torch

from mla_fx.backends.device import Run
from mla_fx.effects import Group


def rule(tokens: torch.Tensor, table: torch.Tensor, *, run: Run, vocabulary: int, group: Group) -> tuple[torch.Tensor]:
    """out[t] = table[tokens[t] - run.rank * A] where this rank holds the token, else 0."""
    out, first = table.new_zeros(len(tokens), table.shape[1]), run.rank * len(table)
    for t, token in enumerate(tokens.tolist()):
        if first <= token < min(first + len(table), vocabulary):
            out[t] = table[token - first]
    return (out,)
