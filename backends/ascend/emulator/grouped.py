"""Emulated npu_grouped_matmul: a matrix for each group of rows; with its refusals.

Without groups it is several products in one (`grouped_apart`).
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from mla_fx.backends.ascend.emulator import grouped_apart
from mla_fx.backends.ascend.emulator.fractal import looking, reading
from mla_fx.backends.ascend.emulator.operator import FLOATS, Operator, or_transposed, require, tiling

#: Arguments of aclnnGroupedMatmulV5 with their words, in order (op-plugin's call).
_GROUPED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "x": "L",
        "weight": "L",
        "bias": "L",
        "scale": "L",
        "offset": "L",
        "antiquant_scale": "L",
        "antiquant_offset": "L",
        "per_token_scale": "L",
        "group_list": "T",
        "activation_input": "L",
        "activation_quant_scale": "L",
        "activation_quant_offset": "L",
        "split_item": "i64",
        "group_type": "i64",
        "group_list_type": "i64",
        "act_type": "i64",
        "tuning_config": "I",
        "out": "W",
        "activation_out": "W",
        "dynamic_quant_scale_out": "W",
    }
)


def check_grouped(*arguments: Any) -> None:
    """One tensor each of rows, weights and results, groups along the rows; dtypes as the page's table has them."""
    given = dict(zip(_GROUPED, arguments, strict=True))
    lists = ("bias", "offset", "antiquant_scale", "antiquant_offset", "activation_input", "activation_quant_scale")
    for name in (*lists, "activation_quant_offset", "tuning_config", "activation_out", "dynamic_quant_scale_out"):
        require(not given[name], f"{name}: not emulated")
    kinds = (given["act_type"], given["group_type"])
    require(kinds in ((0, -1), (0, 0)), f"only act_type 0 with group_type -1 or 0 is emulated: got {kinds}")
    if given["group_type"] == -1:
        return grouped_apart.check(given)
    require(all(len(given[name]) == 1 for name in ("x", "weight", "out")), "only single tensors are emulated")
    require(given["split_item"] in (2, 3), f"split_item must be 2 or 3: got {given['split_item']}")
    (x,), (weight,), (out,), groups = given["x"], given["weight"], given["out"], given["group_list"]
    require(x.dim() == 2 and weight.dim() == 3, f"x must be [M, K], weight [E, K, N]: got {x.dim()}, {weight.dim()}")
    experts, inner, features = weight.shape
    require(x.is_contiguous() and x.shape[1] == inner, f"x must be contiguous, K = {inner}: got {list(x.shape)}")
    plain, turned = weight.is_contiguous(), weight.transpose(1, 2).is_contiguous()
    require(plain or turned, f"weight must be contiguous or transposed: got strides {weight.stride()}")
    require(max(inner, inner if turned else features) < 65536, f"inner axes must be below 65536: got {inner}")
    require(groups is not None and groups.dtype == torch.int64, "group_list must be int64")
    require(list(groups.shape) == [experts], f"group_list must be [{experts}]: got {list(groups.shape)}")
    tiling(experts <= 1024, f"group_list must have at most 1024 groups: got {experts}")
    kind = given["group_list_type"]
    require(kind in (0, 1), f"group_list_type: only 0 and 1 are emulated: got {kind}")
    require(kind == 0 or experts > 1, "group_list_type 1 must have more than one group")
    return _check_grouped_dtypes(x, weight, out, given["scale"], given["per_token_scale"])


def _check_grouped_dtypes(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, scale: list[Any], per_token: list[Any]
) -> None:
    require(x.dtype == weight.dtype, f"x and weight must have one dtype: got {x.dtype} and {weight.dtype}")
    if x.dtype in FLOATS:
        require(not scale and not per_token, "scale and per_token_scale are for int8")
        require(out.dtype == x.dtype, f"out must be {x.dtype}: got {out.dtype}")
        return
    require(x.dtype == torch.int8, f"x must be float16, bfloat16, float32 or int8: got {x.dtype}")
    if out.dtype == torch.int32:
        require(not scale and not per_token, "scale and per_token_scale are for results that are no sums")
        return
    require(len(scale) == len(per_token) == 1, "only int8 with scale and per_token_scale is emulated")
    wanted = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float32}
    require(out.dtype in wanted, f"out must be float16, bfloat16 or int32 beside int8: got {out.dtype}")
    found = scale[0].dtype
    require(found == wanted[out.dtype], f"scale must be {wanted[out.dtype]} beside {out.dtype}: got {found}")
    shape = [weight.shape[0], weight.shape[2]]
    require(list(scale[0].shape) == shape, f"scale must be {shape}: got {list(scale[0].shape)}")
    require(per_token[0].dtype == torch.float32, f"per_token_scale must be float32: got {per_token[0].dtype}")
    require(list(per_token[0].shape) == [x.shape[0]], f"per_token_scale must be [{x.shape[0]}]")


def run_grouped(*arguments: Any) -> None:
    """A product an expert, added up in float32, in int32 for int8; rows behind the groups are not written."""
    given = dict(zip(_GROUPED, arguments, strict=True))
    if given["group_type"] == -1:
        grouped_apart.run(given)
        return
    (x,), (weight,), (out,) = given["x"], given["weight"], given["out"]
    counts = given["group_list"] if given["group_list_type"] == 1 else given["group_list"].diff(prepend=torch.zeros(1))
    numbers = [int(number) for number in counts]
    if min(numbers) < 0 or sum(numbers) > x.shape[0]:
        raise IndexError(f"group_list: must be at least 0 and at most {x.shape[0]} together: got {numbers}")
    end = 0
    for expert, count in enumerate(numbers):
        start, end = end, end + count
        rows, matrix = x[start:end], weight[expert]
        if out.dtype == torch.int32:
            out[start:end] = torch.matmul(rows.int(), matrix.int())
        elif x.dtype == torch.int8:
            scaled = torch.matmul(rows.int(), matrix.int()).float() * given["scale"][0][expert].float()
            out[start:end] = (scaled * given["per_token_scale"][0][start:end].unsqueeze(1)).to(out.dtype)
        else:
            out[start:end] = torch.matmul(rows.float(), matrix.float()).to(out.dtype)


def check_fractal(*arguments: Any) -> None:
    """Of weights in FRACTAL_NZ only what gives 16 bits in one product is emulated; the page has no sums as they are."""
    given = dict(zip(_GROUPED, arguments, strict=True))
    require(given["group_type"] == 0, f"only group_type 0 is emulated in FRACTAL_NZ: got {given['group_type']}")
    check_grouped(*arguments)
    (x,), (out,) = given["x"], given["out"]
    require(x.dtype == torch.int8, f"only int8 is emulated in FRACTAL_NZ: got {x.dtype}")
    require(out.dtype != torch.int32, "out must be float16 or bfloat16 beside a weight in FRACTAL_NZ")


def _ungrouped(function: Callable[..., None]) -> Callable[..., None]:
    """For the form with `quant_group_size` behind `tuning_config`, which is for 4 bits."""
    return lambda *arguments: function(*arguments[:17], *arguments[18:])


def _untuned(function: Callable[..., None]) -> Callable[..., None]:
    """For the form without `tuning_config`."""
    return lambda *arguments: function(*arguments[:16], None, *arguments[16:])


#: Name to operator.
OPERATORS: Final[Mapping[str, Operator]] = MappingProxyType(
    {
        "aclnnGroupedMatmulV5": Operator(" ".join(_GROUPED.values()), run_grouped, check_grouped, lies=or_transposed),
        "aclnnGroupedMatmulWeightNz": Operator(
            " ".join(f"{word} i64" if name == "tuning_config" else word for name, word in _GROUPED.items()),
            reading(_ungrouped(run_grouped)),
            looking(_ungrouped(check_fractal)),
            lies=or_transposed,
            fractal=True,
        ),
        # The wheel takes counts on the device only where this one is there too.
        "aclnnGroupedMatmulV4": Operator(
            " ".join(word for name, word in _GROUPED.items() if name != "tuning_config"),
            _untuned(run_grouped),
            _untuned(check_grouped),
            lies=or_transposed,
        ),
    }
)
