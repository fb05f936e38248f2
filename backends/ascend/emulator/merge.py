"""Emulated npu_attention_update: partial results of attention, weighted by their log-sum-exps.

    weight[i] = exp(lse[i] - logsumexp(lse))        out = sum_i weight[i] * part[i]

An LSE of +inf counts as -inf, which is weight 0; a NaN makes its row NaN, and
so does NaN in a part of weight 0.  A row whose parts all have weight 0 is NaN
for up to 16 parts.  More parts, where a release takes them, run in chunks that
start from a row of zeros with LSE -1e38: there such a row is 0.
Source: attention_update_tiling.cpp and kernels of ops-transformer.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from mla_fx.backends.ascend.emulator.operator import FLOATS, Operator, require, tiling
from mla_fx.backends.ascend.emulator.releases import Release

#: More parts than these run in chunks.
_CHUNK, _START = 16, -1e38


def check(release: Release, lse: list[Any], parts: list[Any], update_type: int, out: torch.Tensor, merged: Any) -> None:
    """Parts by release; D a multiple of 8 up to 512, equal dtypes and shapes."""
    require(len(lse) == len(parts), f"lse and local_out must have one length: got {len(lse)} and {len(parts)}")
    most, version = release.parts, release.version
    tiling(1 <= len(parts) <= most, f"local_out must have 1 to {most} parts in {version}: got {len(parts)}")
    tiling(update_type in (0, 1), f"update_type must be 0 or 1: got {update_type}")
    first = parts[0]
    tiling(first.dim() == 2, f"local_out must be [rows, head_dim]: got {list(first.shape)}")
    tiling(first.dtype in FLOATS, f"local_out must be float16, bfloat16 or float32: got {first.dtype}")
    rows, features = first.shape
    fit = 8 <= features <= 512 and features % 8 == 0
    tiling(fit, f"head_dim must be a multiple of 8 in 8..512: got {features}")
    for one, part in zip(lse, parts, strict=True):
        tiling(one.dtype == torch.float32, f"lse must be float32: got {one.dtype}")
        tiling(list(one.shape) == [rows], f"lse must be [{rows}]: got {list(one.shape)}")
        alike = part.dtype == first.dtype
        tiling(alike, f"local_out must have one dtype: got {part.dtype} and {first.dtype}")
        alike = part.shape == first.shape
        tiling(alike, f"local_out must have one shape: got {list(part.shape)} and {list(first.shape)}")


def run(lse: list[Any], parts: list[Any], update_type: int, out: torch.Tensor, merged: Any) -> None:
    """In float32, rounded once."""
    each = torch.stack(lse)
    each = each.masked_fill(each == math.inf, -math.inf)
    wide = [part.float() for part in parts]
    if len(parts) > _CHUNK:
        each = torch.cat((torch.full_like(each[:1], _START), each))
        wide.insert(0, torch.zeros_like(wide[0]))
    peak = each.amax(0)
    total = peak + torch.log(torch.exp(each - peak).sum(0))
    weights = torch.exp(each - total).unsqueeze(-1)
    out.copy_(sum(weight * part for weight, part in zip(weights, wide, strict=True)))
    if update_type == 1:
        merged.copy_(total)


def operators(release: Release) -> Mapping[str, Operator]:
    """Name to operator."""
    return {"aclnnAttentionUpdate": Operator("L L i64 O O", run, partial(check, release))}
