"""Ascend rule of `ops.PermuteTokens`: npu_moe_init_routing_v2 over this rank's experts (see `calls/experts.py`)."""

import torch

from mla_fx.backends.ascend.calls.experts import EXPERTS, route
from mla_fx.backends.device import Run
from mla_fx.effects import Aval, Group, ops


def takes(op: ops.PermuteTokens, x: Aval, experts: Aval) -> str | None:
    """As many experts as the operator tells apart."""
    count = op.own * op.group.size
    if count > EXPERTS:
        return f"experts: routing on ascend takes at most {EXPERTS} over all ranks: got {count}"
    return None


def rule(
    x: torch.Tensor, experts: torch.Tensor, *, run: Run, own: int, group: Group
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows behind the last pair are left as the operator leaves them: unwritten."""
    if not experts.numel():
        return x.new_empty((0, x.shape[1])), experts.new_zeros((own,), dtype=torch.int64), torch.empty_like(experts)
    mine = range(run.rank * own, (run.rank + 1) * own)
    rows, counts, source, _ = route(x, experts, own=mine, count=own * group.size)
    return rows, counts, source
