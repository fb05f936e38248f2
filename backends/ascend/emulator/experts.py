"""Emulated operators of a mixture of experts: gates, routing there and back; with their refusals.

Refused is what op-plugin's pages and ops-transformer refuse on an A2, as far
as the uses here go; other uses are refused as not emulated.  What an operator
leaves unwritten stays what it was made before the call, NaN.  Where a page
calls a result undefined, for indices on the device, the device faults.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from mla_fx.backends.ascend.emulator.operator import FLOATS, Operator, require, tiling
from mla_fx.backends.ascend.emulator.quant import quantised
from mla_fx.backends.ascend.emulator.releases import Release


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
    """Sizes of experts and groups; `renorm` must be 0.  The wheel looks at dtypes and at the shape of the bias."""
    experts = x.shape[1]
    require(renorm == 0, f"renorm must be 0: got {renorm}")
    require(norm_type in (0, 1) and select in (0, 1), f"norm_type, group_select_mode: got {norm_type}, {select}")
    tiling(experts <= 2048, f"E must be at most 2048: got {experts}")
    require(groups > 0 and experts % groups == 0, f"group_count must divide E = {experts}: got {groups}")
    members = experts // groups
    tiling(members > 2, f"a group must have more than 2 experts: got {members}")
    padded = -(-members // 32) * 32 * groups
    tiling(padded <= 2048, f"groups padded to 32 must have at most 2048 experts: got {padded}")
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


def check_gating_softmax(x: torch.Tensor, finished: torch.Tensor | None, k: int, *results: torch.Tensor) -> None:
    """No more than the operator's page has; the wheel looks at dtype and shapes."""
    require(k <= 1024, f"k must be at most 1024: got {k}")


def run_gating_softmax(x: torch.Tensor, finished: torch.Tensor | None, k: int, *results: torch.Tensor) -> None:
    """In float32.  Rows are numbered expert by expert; a finished one has an expert that there is not."""
    weights, chosen, numbers = results
    p = torch.softmax(x.float(), -1)
    best = p.sort(dim=-1, descending=True, stable=True)
    weights.copy_(best.values[..., :k])
    index = best.indices[..., :k]
    chosen.copy_(index if finished is None else index.masked_fill(finished.unsqueeze(-1), x.shape[-1]))
    tokens = x[..., 0].numel()
    numbers.copy_(torch.arange(k * tokens, dtype=torch.int32).view(k, tokens).t().reshape(numbers.shape))


def check_routing(
    release: Release,
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
    """int32 experts, a range within them; only dropless routing, as it is or to dynamic int8, is emulated."""
    require(x.dtype in (*FLOATS, torch.int8), f"x must be float16, bfloat16, float32 or int8: got {x.dtype}")
    require(experts.dtype == torch.int32, f"expert_idx must be int32: got {experts.dtype}")
    tiling(experts.shape[0] == x.shape[0], f"expert_idx must have {x.shape[0]} rows: got {experts.shape[0]}")
    tiling(count > 0, f"expert_num must be above 0: got {count}")
    tiling(0 <= active[0] < active[1] <= count, f"active_expert_range must be within {count} experts: got {active}")
    tiling(active[1] <= 10240, f"active_expert_range must end at 10240 at most: got {active[1]}")
    require(drop_pad == 0 and quant_mode in (-1, 1), "only drop_pad_mode 0 with quant_mode -1 and 1 is emulated")
    require(quant_mode == -1 or x.dtype in FLOATS, "x must be float16, bfloat16 or float32 with quant_mode 1")
    require(scale is None and offset is None, "scale and offset are not emulated")
    tiling(row_type in (0, 1), f"row_idx_type must be 0 or 1: got {row_type}")
    require(num_type in (0, 1), f"expert_tokens_num_type: only 0 and 1 are emulated: got {num_type}")
    tiling(active_num >= -1, f"active_num must be at least -1: got {active_num}")
    if not release.routes_all:
        pairs, version = experts.numel(), release.version
        fit = active_num in (-1, pairs)
        tiling(fit, f"active_num must be -1 or T * K = {pairs} in {version}: got {active_num}")
        tiling(num_type != 0, f"expert_tokens_num_type must be 1 or 2 in {version}: got {num_type}")
        tiling(num_flag, f"expert_tokens_num_flag must be true in {version}")
    require(num_flag, "without counts: not emulated")


def run_routing(release: Release, x: torch.Tensor, experts: torch.Tensor, *rest: Any) -> None:
    """Rows of the active experts in front, stably, up to `active_num` of them; behind them nothing is written.

    Before 9.0 the kernel for small batches takes -1 at its word and writes no row; larger batches are not told apart.
    """
    _, _, most, _, count, _, num_type, _, quant_mode, (start, end), row_type, rows, index, counts, scale = rest
    flat = experts.flatten().long()
    if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < count:
        raise IndexError(f"expert_idx: must be in 0..{count - 1}: got {flat.tolist()}")
    here = (flat >= start) & (flat < end)
    order = torch.where(here, flat, count).argsort(stable=True)[: int(here.sum())]
    copied = order[:most] if most > 0 else order if release.routes_all else order[:0]
    if quant_mode == 1:
        quantised(x[copied // experts.shape[1]].float(), rows[: len(copied)], scale[: len(copied)])
    else:
        rows[: len(copied)] = x[copied // experts.shape[1]]
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
    require(tokens.dtype in FLOATS, f"permuted_tokens must be float16, bfloat16 or float32: got {tokens.dtype}")
    require(index.dtype == torch.int32 and index.dim() == 1, f"sorted_indices must be int32 [T * K]: got {index.dtype}")
    require(not padded, "padded_mode must be false")
    require(tokens.numel() > 0, "permuted_tokens must not be empty")
    if probs is None:
        return  # one row a token
    require(probs.dtype in FLOATS and probs.dim() == 2, f"probs must be float [T, K]: got {probs.dtype}")
    require(probs.numel() == index.numel(), f"probs must have {index.numel()} numbers: got {probs.numel()}")
    tiling(probs.shape[1] <= 512, f"K must be at most 512: got {probs.shape[1]}")


def run_unpermute(
    tokens: torch.Tensor, index: torch.Tensor, probs: torch.Tensor | None, padded: bool, shape: Any, out: torch.Tensor
) -> None:
    """Weighted sum in float32, rounded once; rows of weight 0 count, as nothing says that they do not."""
    numbers = index.tolist()
    if len(set(numbers)) < len(numbers) or min(numbers) < 0 or max(numbers) >= tokens.shape[0]:
        raise IndexError(f"sorted_indices: must be different, in 0..{tokens.shape[0] - 1}: got {numbers}")
    if probs is None:
        probs = torch.ones(len(numbers), 1)
    each = tokens.float()[index.long()].view(*probs.shape, -1)
    out.copy_((each * probs.float().unsqueeze(2)).sum(1))


def operators(release: Release) -> Mapping[str, Operator]:
    """Name to operator."""
    routing = "T T T T i64 i64 i64 i64 i64 b i64 I i64 O O O O"
    return {
        "aclnnMoeGatingTopK": Operator("T T i64 i64 i64 i64 i64 i64 b d d O O O", run_gating, check_gating),
        "aclnnMoeGatingTopKSoftmax": Operator("T T i64 O O O", run_gating_softmax, check_gating_softmax),
        "aclnnMoeInitRoutingV3": Operator(routing, partial(run_routing, release), partial(check_routing, release)),
        "aclnnMoeTokenUnpermute": Operator("T T T b I O", run_unpermute, check_unpermute),
    }
