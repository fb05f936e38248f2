"""Ascend rule of `ops.QuantGroupedLinear`: npu_dynamic_quant and npu_grouped_matmul; for float32, plain torch between.

Beside bf16 the operator takes the weight's scales in bf16 only (beside fp16
in float32).  They are rounded to it here, which is off by up to 2^-8: as much
as the rounding of the result, which comes on top.
"""

import torch

from mla_fx.backends.ascend.calls import grouped as call
from mla_fx.backends.ascend.calls.dtypes import wrong_dtype
from mla_fx.backends.ascend.calls.fractal import plain
from mla_fx.backends.ascend.calls.grouped import grouped
from mla_fx.backends.ascend.calls.quantised import experts_of_rows, grouped_total, quantise
from mla_fx.backends.device import Run
from mla_fx.effects import Aval, ops


def takes(op: ops.QuantGroupedLinear, rows: Aval, weight: Aval, *others: Aval) -> str | None:
    """Experts and features that the operator takes, of float32 as well, which goes through it in pieces."""
    return wrong_dtype("rows", rows) or call.takes(weight)


def rule(
    rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, counts: torch.Tensor, *, run: Run
) -> tuple[torch.Tensor]:
    """Rows behind the last count are quantised along and left unwritten by the product."""
    if not rows.shape[0]:
        return (rows.new_empty((0, weight.shape[1])),)
    if rows.dtype == torch.float32:
        q, step = quantise(rows)
        of_rows = torch.index_select(scale, 0, experts_of_rows(counts, rows.shape[0]))
        return (grouped_total(q, plain(weight), counts) * step.unsqueeze(1) * of_rows,)
    q, step = torch.ops.npu.npu_dynamic_quant(rows)
    scales = scale.to(torch.bfloat16) if rows.dtype == torch.bfloat16 else scale.contiguous()
    return (grouped(q, weight, counts, scale=[scales], per_token_scale=[step], output_dtype=rows.dtype),)
