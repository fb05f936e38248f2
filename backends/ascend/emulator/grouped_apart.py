"""Emulated npu_grouped_matmul without groups: several products, each of tensors of its own, in one launch.

    out[i] = x[i] weight[i]

Source: the page of npu_grouped_matmul in op-plugin, group_type -1.
"""

from collections.abc import Mapping
from typing import Any

import torch

from mla_fx.backends.ascend.emulator.operator import FLOATS, require

_LISTS, _LIMIT = 128, 65536


def check(given: Mapping[str, Any]) -> None:
    """Lists of one length, no groups, weights all transposed or none, one floating dtype; x is never transposed."""
    xs, weights, outs = given["x"], given["weight"], given["out"]
    require(given["split_item"] in (0, 1), f"split_item must be 0 or 1 for group_type -1: got {given['split_item']}")
    require(given["group_list"] is None, "group_list must be left out for group_type -1")
    require(
        not given["scale"] and not given["per_token_scale"], "only products of floats are emulated in group_type -1"
    )
    counts = (len(xs), len(weights), len(outs))
    require(1 <= len(xs) <= _LISTS and len(set(counts)) == 1, f"lists must have one length, 1 to 128: got {counts}")
    for x, weight, out in zip(xs, weights, outs, strict=True):
        require(x.dtype in FLOATS, f"x must be float16, bfloat16 or float32: got {x.dtype}")
        require(weight.dtype == out.dtype == x.dtype == xs[0].dtype, f"dtypes must be equal: got {weight.dtype}")
        require(x.dim() == 2 and weight.dim() == 2, f"only 2 axes are emulated: got {x.dim()} and {weight.dim()}")
        require(x.shape[1] == weight.shape[0], f"K must be {x.shape[1]}: got {weight.shape[0]}")
        require(x.is_contiguous(), f"x must be contiguous: got strides {x.stride()}")
        require(max(x.shape[1], weight.stride(0), weight.stride(1)) < _LIMIT, "inner axes must be below 65536")
    plain = all(weight.is_contiguous() for weight in weights)
    turned = all(weight.t().is_contiguous() for weight in weights)
    require(plain or turned, "weight must be contiguous, or transposed, all alike")


def run(given: Mapping[str, Any]) -> None:
    """Added up in float32, rounded once."""
    for x, weight, out in zip(given["x"], given["weight"], given["out"], strict=True):
        out.copy_(torch.matmul(x.float(), weight.float()))
