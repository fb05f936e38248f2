"""Emulated everyday operators beside the pointwise ones: products, reductions, sorts, indexing, shapes."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from mla_fx.backends.ascend.emulator.operator import Operator, or_transposed
from mla_fx.dtypes import wide


def _matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, cube_math_type: int) -> None:
    """Products of 16-bit numbers are added up in float32, as the cube unit does."""
    out.copy_(torch.matmul(a.float(), b.float()))


def _addmm(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: Any, alpha: Any, out: torch.Tensor, _: int) -> None:
    product = alpha * torch.matmul(a.float(), b.float())
    out.copy_(product if beta == 0 else product + beta * c.float())


def _index_select(source: torch.Tensor, axis: int, index: torch.Tensor, out: torch.Tensor) -> None:
    """An index out of range is a fault on the device, as torch raises it."""
    out.copy_(torch.index_select(source, axis, index.long()))


def _embedding(table: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    _index_select(table, 0, index.flatten(), out.view(index.numel(), -1))


def _indices(given: list[Any]) -> tuple[Any, ...]:
    """An empty index stands for an axis that is not indexed."""
    return tuple(slice(None) if part is None or not part.numel() else part for part in given)


def _put(a: torch.Tensor, given: list[Any], values: torch.Tensor, accumulate: bool, unsafe: bool) -> None:
    if accumulate:
        a.index_put_([None if part is None or not part.numel() else part for part in given], values, accumulate=True)
    else:
        a[_indices(given)] = values


def _scattered(a: torch.Tensor, axis: int, index: torch.Tensor, source: Any, reduction: int, out: torch.Tensor) -> None:
    """Reduction 0 replaces, 1 adds, 2 multiplies; `source` a tensor or a number."""
    if reduction == 0:
        out.copy_(a.scatter(axis, index, source))
    else:
        out.copy_(a.scatter(axis, index, source, reduce=("add", "multiply")[reduction - 1]))


def _scattered_in_place(a: torch.Tensor, axis: int, index: torch.Tensor, source: Any, reduction: int) -> None:
    _scattered(a, axis, index, source, reduction, a)


def _sort(a: torch.Tensor, stable: bool, axis: int, descending: bool, values: Any, indices: Any) -> None:
    """Unless it is asked to be stable, equal numbers come in the order that is least expected."""
    if stable:
        found, index = a.sort(stable=True, dim=axis, descending=descending)
    else:
        found, index = a.flip(axis).sort(stable=True, dim=axis, descending=descending)
        index = a.shape[axis] - 1 - index
    values.copy_(found)
    indices.copy_(index)


def _topk(a: torch.Tensor, k: int, axis: int, largest: bool, in_order: bool, values: Any, indices: Any) -> None:
    """As a sort that is not stable; where no order is asked for, backwards."""
    whole = [torch.empty_like(a), torch.empty(a.shape, dtype=torch.int64)]
    _sort(a, False, axis, largest, *whole)
    for part, out in zip(whole, (values, indices), strict=True):
        best = part.narrow(axis, 0, k)
        out.copy_(best if in_order else best.flip(axis))


def _one_hot(a: torch.Tensor, classes: int, on: torch.Tensor, off: torch.Tensor, axis: int, out: torch.Tensor) -> None:
    """Numbers that are no class have no place that is on."""
    place = torch.arange(classes)
    found = torch.where(a.unsqueeze(-1) == place, on, off)
    out.copy_(found if axis in (-1, a.dim()) else found.movedim(-1, axis))


def _best(function: Any) -> Any:
    def run(a: torch.Tensor, axis: int, keep: bool, values: torch.Tensor, indices: torch.Tensor) -> None:
        found, index = function(a, axis, keep)
        values.copy_(found)
        indices.copy_(index)

    return run


_REDUCTIONS: Final[Mapping[str, Operator]] = {
    "aclnnAll": Operator("T I b O", lambda a, axes, keep, out: out.copy_(torch.all(a, axes, keep))),
    "aclnnAny": Operator("T I b O", lambda a, axes, keep, out: out.copy_(torch.any(a, axes, keep))),
    "aclnnAmax": Operator("T I b O", lambda a, axes, keep, out: out.copy_(torch.amax(a, axes, keep))),
    "aclnnAmin": Operator("T I b O", lambda a, axes, keep, out: out.copy_(torch.amin(a, axes, keep))),
    "aclnnMax": Operator("T O", lambda a, out: out.copy_(a.max())),
    "aclnnMin": Operator("T O", lambda a, out: out.copy_(a.min())),
    "aclnnMaxDim": Operator("T i64 b O O", _best(torch.max)),
    "aclnnMinDim": Operator("T i64 b O O", _best(torch.min)),
    "aclnnArgMax": Operator("T i64 b O", lambda a, axis, keep, out: out.copy_(a.argmax(axis, keep))),
    "aclnnArgMin": Operator("T i64 b O", lambda a, axis, keep, out: out.copy_(a.argmin(axis, keep))),
    "aclnnLogSumExp": Operator("T I b O", lambda a, axes, keep, out: out.copy_(torch.logsumexp(a, axes, keep))),
    "aclnnReduceSum": Operator(
        "T I b i32 O", lambda a, axes, keep, kind, out: out.copy_(a.sum(axes, keep, dtype=out.dtype))
    ),
    "aclnnMean": Operator(
        "T I b i32 O", lambda a, axes, keep, kind, out: out.copy_(a.mean(axes, keep, dtype=wide(out.dtype)))
    ),
    "aclnnProd": Operator("T i32 O", lambda a, kind, out: out.copy_(a.prod())),
    "aclnnProdDim": Operator("T i64 b i32 O", lambda a, axis, keep, kind, out: out.copy_(a.prod(axis, keep))),
    "aclnnCumsum": Operator("T i64 i32 O", lambda a, axis, kind, out: out.copy_(a.cumsum(axis, dtype=out.dtype))),
    "aclnnSoftmax": Operator("T i64 O", lambda a, axis, out: out.copy_(torch.softmax(a, axis))),
    "aclnnLogSoftmax": Operator("T i64 O", lambda a, axis, out: out.copy_(torch.log_softmax(a, axis))),
    "aclnnLinalgVectorNorm": Operator(
        "T S I b i32 O",
        lambda a, order, axes, keep, kind, out: out.copy_(torch.linalg.vector_norm(a, order, axes or None, keep)),
    ),
    "aclnnNorm": Operator(
        "T S I b O", lambda a, order, axes, keep, out: out.copy_(torch.linalg.vector_norm(a, order, axes or None, keep))
    ),
}

#: Name to operator.
OPERATORS: Final[Mapping[str, Operator]] = MappingProxyType(
    {
        "aclnnMatmul": Operator("T T O i8", _matmul, lies=or_transposed),
        "aclnnMm": Operator("T T O i8", _matmul, lies=or_transposed),
        "aclnnBatchMatMul": Operator("T T O i8", _matmul, lies=or_transposed),
        "aclnnMv": Operator("T T O i8", _matmul, lies=or_transposed),
        "aclnnDot": Operator("T T O", lambda a, b, out: out.copy_(torch.dot(a.float(), b.float()))),
        "aclnnAddmm": Operator("T T T S S O i8", _addmm, lies=or_transposed),
        "aclnnBaddbmm": Operator("T T T S S O i8", _addmm, lies=or_transposed),
        **_REDUCTIONS,
        "aclnnSort": Operator("T b i64 b O O", _sort),
        "aclnnTopk": Operator("T i64 i64 b b O O", _topk),
        "aclnnTopkV2": Operator("T i64 i64 b b i64 O O", lambda *given: _topk(*given[:5], *given[6:])),
        "aclnnOneHot": Operator("T i32 T T i64 O", _one_hot),
        "aclnnIndexSelect": Operator("T i64 T O", _index_select),
        "aclnnEmbedding": Operator("T T O", _embedding),
        "aclnnGather": Operator("T i64 T O", lambda a, axis, index, out: out.copy_(a.gather(axis, index))),
        "aclnnScatter": Operator("T i64 T T i64 O", _scattered),
        "aclnnScatterValue": Operator("T i64 T S i64 O", _scattered),
        "aclnnInplaceScatter": Operator("T i64 T T i64", _scattered_in_place),
        "aclnnInplaceScatterValue": Operator("T i64 T S i64", _scattered_in_place),
        "aclnnScatterAdd": Operator(
            "T i64 T T O", lambda a, axis, index, source, out: out.copy_(a.scatter_add(axis, index, source))
        ),
        "aclnnIndex": Operator("T L O", lambda a, given, out: out.copy_(a[_indices(given)])),
        "aclnnIndexPutImpl": Operator("T L T b b", _put),
        "aclnnMaskedSelect": Operator("T T D", lambda a, mask, out: out.put(torch.masked_select(a, mask))),
        "aclnnNonzero": Operator("T D", lambda a, out: out.put(torch.nonzero(a))),
        "aclnnNonzeroV2": Operator("T D", lambda a, out: out.put(torch.nonzero(a).t())),
        "aclnnCat": Operator("L i64 O", lambda parts, axis, out: out.copy_(torch.cat(parts, axis))),
        "aclnnStack": Operator("L i64 O", lambda parts, axis, out: out.copy_(torch.stack(parts, axis))),
        "aclnnRepeat": Operator("T I O", lambda a, times, out: out.copy_(a.repeat(times))),
        "aclnnFlip": Operator("T I O", lambda a, axes, out: out.copy_(a.flip(axes))),
        "aclnnRoll": Operator("T I I O", lambda a, shifts, axes, out: out.copy_(torch.roll(a, shifts, axes or []))),
        "aclnnConstantPadNd": Operator(
            "T I S O", lambda a, pad, value, out: out.copy_(torch.constant_pad_nd(a, pad, value))
        ),
        "aclnnTriu": Operator("T i64 O", lambda a, diagonal, out: out.copy_(torch.triu(a, diagonal))),
        "aclnnTril": Operator("T i64 O", lambda a, diagonal, out: out.copy_(torch.tril(a, diagonal))),
        "aclnnInplaceTriu": Operator("T i64", lambda a, diagonal: a.copy_(torch.triu(a, diagonal))),
        "aclnnInplaceTril": Operator("T i64", lambda a, diagonal: a.copy_(torch.tril(a, diagonal))),
        "aclnnEye": Operator("i64 i64 O", lambda rows, columns, out: out.copy_(torch.eye(rows, columns))),
        "aclnnArange": Operator("S S S O", lambda start, end, step, out: out.copy_(torch.arange(start, end, step))),
        "aclnnLinspace": Operator("S S i64 O", lambda start, end, n, out: out.copy_(torch.linspace(start, end, n))),
    }
)
