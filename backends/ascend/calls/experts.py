"""Routing there and back, and the activation between two 8-bit products: npu_moe_init_routing_v2 and its kin.

With a range of active experts `npu_moe_init_routing_v2` sorts the pairs of that
range stably to the front.  `row_idx_type` 0 makes its index the op's `source`,
for each pair its row and -1 for pairs of other ranks, `expert_tokens_num_type` 1
its counts the op's `counts`.  Both stay on the device.

`npu_moe_finalize_routing` adds the rows up again.  Its `drop_pad_mode` 3 is for
experts of a fixed capacity that drop what is too much: an index of a row for
each pair, row by row, and -1 for a pair that was dropped, whose row is neither
read nor weighed.  That is `source`, if all rows are those of one expert of that
capacity.  Weights are float32 beside bf16 and float32; beside fp16 they would
have to be fp16, so there the rows are widened.
Sources: op-plugin and ops-transformer, `moe_finalize_routing_v2`.

`npu_dequant_swiglu_quant` takes the integer sums of the first product, with the
scales of the weight by group and of the token, and gives 8 bits and a scale for
the second.  In groups it takes gate and up of a multiple of 64 and at most 7232
features together: the least of what its pages and its tiling say.
`npu_grouped_matmul_swiglu_quant_v2` makes these sums too, in the same launch,
of a weight in FRACTAL_NZ; the form without v2 wants cumulative counts, which
the routing of CANN 8.5 does not give.
Source: op-plugin, `dequant_swiglu_quant` of ops-nn, and the page of
aclnnGroupedMatmulSwigluQuantV2.
"""

import torch

#: The most experts that routing tells apart; the most features of gate and up that go through the activation.
EXPERTS, WIDEST = 10240, 7232
_MULTIPLE = 64
_DROP_PAD_BY_ROWS = 3


def route(
    x: torch.Tensor, experts: torch.Tensor, *, own: range, count: int, quantise: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of the experts `own` among `count`, counts, source, and the steps of the rows where they are quantised.

    `x` [T, D], `experts` int32 [T, U], none of them empty.  Rows and steps behind the last pair are unwritten.
    """
    rows, source, counts, steps = torch.ops.npu.npu_moe_init_routing_v2(
        x.contiguous(),
        experts.contiguous(),
        active_num=experts.numel(),  # 8.5 takes -1 at its word and copies no row
        expert_num=count,
        active_expert_range=[own.start, own.stop],
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        quant_mode=1 if quantise else -1,
        row_idx_type=0,
    )
    return rows, counts, source.view(experts.shape), steps


def finalise(
    rows: torch.Tensor, source: torch.Tensor, weights: torch.Tensor, *, other: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows back at their tokens, weighted, and `other` [T, D] added: summed in float32, rounded once.

    `rows` [T U, D], `source` int32 [T, U], `weights` float32 [T, U] -> [T, D] like `rows`.
    """
    dtype = rows.dtype
    if not rows.numel():
        return rows.new_zeros((source.shape[0], rows.shape[1]))
    if dtype == torch.float16:
        rows, other = rows.to(torch.float32), None if other is None else other.to(torch.float32)
    out: torch.Tensor = torch.ops.npu.npu_moe_finalize_routing(
        rows.contiguous().unsqueeze(0),
        None if other is None else other.contiguous(),
        None,
        None,
        weights.contiguous(),
        source.reshape(-1),
        None,
        drop_pad_mode=_DROP_PAD_BY_ROWS,
    )
    return out.to(dtype)


def fits(width: int) -> bool:
    """Whether `swiglu_quantised` takes gate and up of so many features together.

    >>> [fits(width) for width in (64, 4096, 7232, 96, 7296)]
    [True, True, True, False, False]
    """
    return width % _MULTIPLE == 0 and 0 < width <= WIDEST


def swiglu_quantised(
    sums: torch.Tensor, scale: torch.Tensor, steps: torch.Tensor, counts: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The activation of `sums` int32 [Z, 2 F], gate first, in 8 bits and its steps: int8 [Z, F], float32 [Z].

    `scale` float32 [Y, 2 F] of the weight, `steps` float32 [Z] of the rows, `counts` int64 [Y]; without counts `scale`
    is [2 F], for all rows.  In float32 between.
    """
    act, of_act = torch.ops.npu.npu_dequant_swiglu_quant(
        sums, weight_scale=scale, activation_scale=steps, group_index=counts, activate_left=True, quant_mode=1
    )
    return act, of_act


def product_swiglu_quantised(
    rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, steps: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`swiglu_quantised` of the sums of `rows` int8 [Z, D] and `weight` int8 [Y, 2 F, D], which is in FRACTAL_NZ."""
    act, of_act = torch.ops.npu.npu_grouped_matmul_swiglu_quant_v2(
        rows, [weight.transpose(1, 2)], [scale], steps, counts, group_list_type=1 if len(weight) > 1 else 0
    )
    return act, of_act
