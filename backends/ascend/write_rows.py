"""Ascend rule of `ops.WriteRows`.

There is no operator for one cache that skips slots of -1, so the one for two is
given the same cache twice: the same bits to the same places.  A pair of caches
goes in one call (`write_rows_pair`), into which `Backend.lower` brings a step.
"""

import torch

from mla_fx.backends.ascend.calls import scatter
from mla_fx.backends.device import Run
from mla_fx.effects import Aval, ops


def takes(op: ops.WriteRows, cache: Aval, rows: Aval, slots: Aval) -> str | None:
    """Caches that the operator writes."""
    return scatter.takes("cache", cache)


def rule(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
    """Copy the rows whose slot is not -1, in place."""
    scatter.scatter((cache, cache), (rows, rows), slots)
    return (cache,)
