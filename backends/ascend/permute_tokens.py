"""Ascend rule of `ops.PermuteTokens`: npu_moe_init_routing_v2 over the experts of this rank.

With a range of active experts the operator sorts the pairs of that range
stably to the front.  `row_idx_type` 0 makes its index the op's `source`, for
each pair its row and -1 for pairs of other ranks, `expert_tokens_num_type` 1
its counts the op's `counts`.  Both stay on the device.
"""

import torch

from mla_fx.backends.device import Run
from mla_fx.effects import Aval, Group, ops

#: The most experts that the operator tells apart.
EXPERTS = 10240


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
    rows, source, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(
        x.contiguous(),
        experts.contiguous(),
        active_num=experts.numel(),  # 8.5 takes -1 at its word and copies no row
        expert_num=own * group.size,
        active_expert_range=[run.rank * own, (run.rank + 1) * own],
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        quant_mode=-1,
        row_idx_type=0,
    )
    return rows, counts, source.view(experts.shape)
