"""Emulated operators of a mixture of experts: gate, routing there and back, grouped product; with their refusals.

Refused is what op-plugin's pages and ops-transformer refuse on an A2, as far
as the uses here go; other uses are refused as not emulated.  What an operator
leaves unwritten stays what it was made before the call, NaN.  Where a page
calls a result undefined, for indices on the device, the device faults.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from mla_fx.backends.ascend.emulator.operator import TILING_REFUSED, Operator, require

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def check_swiglu(x: torch.Tensor, axis: int, out: torch.Tensor) -> None:
    """Contiguous, not empty, an even axis."""
    require(x.dtype in _FLOATS, f"x must be float16, bfloat16 or float32: got {x.dtype}")
    require(x.numel() > 0, "x must not be empty")
    require(x.is_contiguous(), f"x must be contiguous: got strides {x.stride()}")
    require(x.shape[axis] % 2 == 0, f"axis {axis} of x must be even: got {x.shape[axis]}")


def run_swiglu(x: torch.Tensor, axis: int, out: torch.Tensor) -> None:
    """In float32, rounded once."""
    gate, up = x.float().chunk(2, axis)
    out.copy_(gate / (1 + torch.exp(-gate)) * up)


def check_gating(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    k: int,
    k_group: int,
    groups: int,
    select: int,
    renorm: int,
    norm_type: int,
    out_flag: bool,
    scale: float,
    epsilon: float,
    *results: torch.Tensor,
) -> None:
    """Sizes of experts and groups; `renorm` must be 0."""
    require(x.dtype in _FLOATS and x.dim() == 2, f"x must be float [T, E]: got {x.dtype} {list(x.shape)}")
    require(bias is None or bias.dtype == x.dtype, "bias must have the dtype of x")
    experts = x.shape[1]
    require(bias is None or list(bias.shape) == [experts], f"bias must be [{experts}]")
    require(renorm == 0, f"renorm must be 0: got {renorm}")
    require(norm_type in (0, 1) and select in (0, 1), f"norm_type, group_select_mode: got {norm_type}, {select}")
    require(experts <= 2048, f"E must be at most 2048: got {experts}", TILING_REFUSED)
    require(groups > 0 and experts % groups == 0, f"group_count must divide E = {experts}: got {groups}")
    members = experts // groups
    require(members > 2, f"a group must have more than 2 experts: got {members}", TILING_REFUSED)
    padded = -(-members // 32) * 32 * groups
    require(padded <= 2048, f"groups padded to 32 must have at most 2048 experts: got {padded}", TILING_REFUSED)
    require(1 <= k_group <= groups, f"k_group must be in 1..{groups}: got {k_group}")
    require(1 <= k <= k_group * members, f"k must be in 1..{k_group * members}: got {k}")


def run_gating(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    k: int,
    k_group: int,
    groups: int,
    select: int,
    renorm: int,
    norm_type: int,
    out_flag: bool,
    scale: float,
    epsilon: float,
    *results: torch.Tensor,
) -> None:
    """In float32, with stable sorts as the page's description has them."""
    weights, chosen, normed = results
    wide = x.float()
    p = 1 / (1 + torch.exp(-wide)) if norm_type == 1 else torch.softmax(wide, 1)
    s = p if bias is None else p + bias.float()
    grouped = s.view(x.shape[0], groups, -1)
    best = grouped.sort(dim=2, descending=True).values
    score = best[..., :2].sum(2) if select == 1 else best[..., 0]
    dropped = score.sort(dim=1, descending=True, stable=True).indices[:, k_group:]
    grouped = grouped.scatter(1, dropped.unsqueeze(2).expand(-1, -1, grouped.shape[2]), float("-inf"))
    index = grouped.flatten(1).sort(dim=1, descending=True, stable=True).indices[:, :k]
    taken = p.gather(1, index)
    if norm_type == 1:
        taken = taken / (taken.sum(1, keepdim=True) + epsilon)
    weights.copy_(taken * scale)
    chosen.copy_(index)
    if out_flag:
        normed.copy_(p)


def check_routing(
    x: torch.Tensor,
    experts: torch.Tensor,
    scale: Any,
    offset: Any,
    active_num: int,
    capacity: int,
    count: int,
    drop_pad: int,
    num_type: int,
    num_flag: bool,
    quant_mode: int,
    active: list[int],
    row_type: int,
    *results: Any,
) -> None:
    """int32 experts, a range within them; only dropless routing without quantisation is emulated."""
    require(x.dtype in (*_FLOATS, torch.int8), f"x must be float16, bfloat16, float32 or int8: got {x.dtype}")
    require(experts.dtype == torch.int32, f"expert_idx must be int32: got {experts.dtype}")
    require(x.dim() == experts.dim() == 2 and x.shape[0] == experts.shape[0], "x must be [T, H], expert_idx [T, K]")
    require(0 <= count <= 10240, f"expert_num must be in 0..10240: got {count}")
    require(len(active) == 2 and 0 <= active[0] < active[1] <= count, f"active_expert_range: got {active} of {count}")
    require(drop_pad == 0 and quant_mode == -1, "only drop_pad_mode 0 with quant_mode -1 is emulated")
    require(scale is None and offset is None and active_num <= 0, "scale, offset and active_num are not emulated")
    require(num_type in (0, 1) and num_flag, "only counts, and cumulative ones, are emulated")
    require(row_type in (0, 1), f"row_idx_type must be 0 or 1: got {row_type}")


def run_routing(x: torch.Tensor, experts: torch.Tensor, *rest: Any) -> None:
    """Rows of the active experts in front, stably; behind them nothing is written."""
    _, _, _, _, count, _, num_type, _, _, (start, end), row_type, rows, index, counts, _ = rest
    flat = experts.flatten().long()
    if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < count:
        raise IndexError(f"expert_idx: must be in 0..{count - 1}: got {flat.tolist()}")
    here = (flat >= start) & (flat < end)
    order = torch.where(here, flat, count).argsort(stable=True)[: int(here.sum())]
    rows[: len(order)] = x[order // experts.shape[1]]
    found = torch.bincount(flat[here] - start, minlength=end - start)
    counts.copy_(found.cumsum(0) if num_type == 0 else found)
    if row_type == 1:
        index[: len(order)] = order.int()
    else:
        index.fill_(-1)
        index[order] = torch.arange(len(order), dtype=torch.int32)


def check_unpermute(
    tokens: torch.Tensor, index: torch.Tensor, probs: torch.Tensor | None, padded: bool, shape: Any, out: torch.Tensor
) -> None:
    """int32 indices, one for each row; at most 512 a token."""
    require(tokens.dtype in _FLOATS, f"permuted_tokens must be float16, bfloat16 or float32: got {tokens.dtype}")
    require(index.dtype == torch.int32 and index.dim() == 1, f"sorted_indices must be int32 [T * K]: got {index.dtype}")
    require(not padded, "padded_mode must be false")
    require(tokens.numel() > 0, "permuted_tokens must not be empty")
    require(probs is not None, "without probs: not emulated")
    assert probs is not None
    require(probs.dtype in _FLOATS and probs.dim() == 2, f"probs must be float [T, K]: got {probs.dtype}")
    require(probs.numel() == index.numel(), f"probs must have {index.numel()} numbers: got {probs.numel()}")
    require(probs.shape[1] <= 512, f"K must be at most 512: got {probs.shape[1]}", TILING_REFUSED)


def run_unpermute(
    tokens: torch.Tensor, index: torch.Tensor, probs: torch.Tensor, padded: bool, shape: Any, out: torch.Tensor
) -> None:
    """Weighted sum in float32, rounded once; rows of weight 0 count, as nothing says that they do not."""
    numbers = index.tolist()
    if len(set(numbers)) < len(numbers) or min(numbers) < 0 or max(numbers) >= tokens.shape[0]:
        raise IndexError(f"sorted_indices: must be different, in 0..{tokens.shape[0] - 1}: got {numbers}")
    each = tokens.float()[index.long()].view(*probs.shape, -1)
    out.copy_((each * probs.float().unsqueeze(2)).sum(1))


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
    require(given["act_type"] == 0 and given["group_type"] == 0, "only act_type 0 and group_type 0 are emulated")
    require(all(len(given[name]) == 1 for name in ("x", "weight", "out")), "only single tensors are emulated")
    require(given["split_item"] in (2, 3), f"split_item must be 2 or 3: got {given['split_item']}")
    (x,), (weight,), (out,), groups = given["x"], given["weight"], given["out"], given["group_list"]
    require(x.dim() == 2 and weight.dim() == 3, f"x must be [M, K], weight [E, K, N]: got {x.dim()}, {weight.dim()}")
    experts, inner, features = weight.shape
    require(x.is_contiguous() and x.shape[1] == inner, f"x must be contiguous, K = {inner}: got {list(x.shape)}")
    plain, turned = weight.is_contiguous(), weight.transpose(1, 2).is_contiguous()
    require(plain or turned, f"weight must be contiguous or transposed: got strides {weight.stride()}")
    require(max(inner, inner if turned else features) < 65536, f"inner axes must be below 65536: got {inner}")
    require(list(out.shape) == [x.shape[0], features], f"out must be {[x.shape[0], features]}: got {list(out.shape)}")
    require(groups is not None and groups.dtype == torch.int64, "group_list must be int64")
    require(list(groups.shape) == [experts], f"group_list must be [{experts}]: got {list(groups.shape)}")
    require(experts <= 1024, f"group_list must have at most 1024 groups: got {experts}", TILING_REFUSED)
    kind = given["group_list_type"]
    require(kind in (0, 1), f"group_list_type: only 0 and 1 are emulated: got {kind}")
    require(kind == 0 or experts > 1, "group_list_type 1 must have more than one group")
    _check_grouped_dtypes(x, weight, out, given["scale"], given["per_token_scale"])


def _check_grouped_dtypes(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, scale: list[Any], per_token: list[Any]
) -> None:
    require(x.dtype == weight.dtype, f"x and weight must have one dtype: got {x.dtype} and {weight.dtype}")
    if x.dtype in _FLOATS:
        require(not scale and not per_token, "scale and per_token_scale are for int8")
        require(out.dtype == x.dtype, f"out must be {x.dtype}: got {out.dtype}")
        return
    require(x.dtype == torch.int8, f"x must be float16, bfloat16, float32 or int8: got {x.dtype}")
    require(len(scale) == len(per_token) == 1, "only int8 with scale and per_token_scale is emulated")
    wanted = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float32}
    require(out.dtype in wanted, f"out must be float16 or bfloat16 beside int8: got {out.dtype}")
    found = scale[0].dtype
    require(found == wanted[out.dtype], f"scale must be {wanted[out.dtype]} beside {out.dtype}: got {found}")
    shape = [weight.shape[0], weight.shape[2]]
    require(list(scale[0].shape) == shape, f"scale must be {shape}: got {list(scale[0].shape)}")
    require(per_token[0].dtype == torch.float32, f"per_token_scale must be float32: got {per_token[0].dtype}")
    require(list(per_token[0].shape) == [x.shape[0]], f"per_token_scale must be [{x.shape[0]}]")


def run_grouped(*arguments: Any) -> None:
    """A product an expert, added up in float32, in int32 for int8; rows behind the groups are not written."""
    given = dict(zip(_GROUPED, arguments, strict=True))
    (x,), (weight,), (out,) = given["x"], given["weight"], given["out"]
    counts = given["group_list"] if given["group_list_type"] == 1 else given["group_list"].diff(prepend=torch.zeros(1))
    numbers = [int(number) for number in counts]
    if min(numbers) < 0 or sum(numbers) > x.shape[0]:
        raise IndexError(f"group_list: must be at least 0 and at most {x.shape[0]} together: got {numbers}")
    end = 0
    for expert, count in enumerate(numbers):
        start, end = end, end + count
        rows, matrix = x[start:end], weight[expert]
        if x.dtype == torch.int8:
            scaled = torch.matmul(rows.int(), matrix.int()).float() * given["scale"][0][expert].float()
            out[start:end] = (scaled * given["per_token_scale"][0][start:end].unsqueeze(1)).to(out.dtype)
        else:
            out[start:end] = torch.matmul(rows.float(), matrix.float()).to(out.dtype)


def _untuned(function: Callable[..., None]) -> Callable[..., None]:
    """For the form without `tuning_config`."""
    return lambda *arguments: function(*arguments[:16], None, *arguments[16:])


#: Name to operator.
OPERATORS: Final[Mapping[str, Operator]] = MappingProxyType(
    {
        "aclnnSwiGlu": Operator("T i64 O", run_swiglu, check_swiglu),
        "aclnnMoeGatingTopK": Operator("T T i64 i64 i64 i64 i64 i64 b d d O O O", run_gating, check_gating),
        "aclnnMoeInitRoutingV3": Operator(
            "T T T T i64 i64 i64 i64 i64 b i64 I i64 O O O O", run_routing, check_routing
        ),
        "aclnnMoeTokenUnpermute": Operator("T T T b I O", run_unpermute, check_unpermute),
        "aclnnGroupedMatmulV5": Operator(" ".join(_GROUPED.values()), run_grouped, check_grouped),
        # The wheel takes counts on the device only where this one is there too.
        "aclnnGroupedMatmulV4": Operator(
            " ".join(word for name, word in _GROUPED.items() if name != "tuning_config"),
            _untuned(run_grouped),
            _untuned(check_grouped),
        ),
    }
)
