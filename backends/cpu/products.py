"""Matrix products, each by what is fastest on the processor, and the form that weights are kept in for it.

| the processor has | the dtype | a weight is kept | products are |
|---|---|---|---|
| 16-bit products | that one | packed by oneDNN, each expert's by itself, those of heads as they are | oneDNN's |
| AVX2 and FMA | 16 bits without such products, float32 | in panels | the compiled kernel's |
| AVX2, no 8-bit dot products | int8 beside scales | in panels | the compiled kernel's |
| else, or no compiler | any | as it is | torch's, 16 bits widened piece by piece |

Heads are one product for all: packed, they would be as many calls as heads.

Panels are 16 features side by side, [F / 16, D, 16] of a weight [F, D], so F
must be a multiple of 16; in int8 two neighbours of D lie together, [F / 16,
D / 2, 16, 2].  The kernel (`kernel/linear.cpp`) widens them in registers: with
few rows a product takes the time of reading the weight once.  It sums each
result in the order of D whatever is beside it, so a row gives the same bits
alone, in any batch and on any number of threads.

Operands are one for each of some ranks, and lie as the first rank's do; where
the kernel multiplies, all of them are one call.

All sums are in float32 (float64 beside float64), those of int8 exact.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Final

import torch
from torch.nn import functional

from mla_fx.backends.cpu import kernel
from mla_fx.backends.cpu.kernel import Tensors
from mla_fx.backends.table import Formed

#: Numbers of a weight that torch widens at a time: 2 MiB in float32.
PIECE = 1 << 19
#: Rows from which on that pays for a weight that is used once a row.
ROWS = 4
#: Features side by side.
PANEL: Final = 16


@cache
def has(dtype: torch.dtype) -> bool:
    """Whether the processor multiplies numbers of a dtype as they are."""
    if dtype == torch.int8:
        return bool(torch.cpu._is_vnni_supported())
    if dtype == torch.bfloat16:
        # oneDNN alone says so of any AVX-512, and widens number by number there.
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported() and torch.cpu._is_avx512_bf16_supported())
    return dtype != torch.float16 or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


@cache
def compiled(dtype: torch.dtype) -> bool:
    """Whether products with weights of a dtype are the compiled kernel's."""
    if dtype not in kernel.FORMATS and dtype != torch.int8:
        return False
    return (dtype == torch.float32 or not has(dtype)) and kernel.engine() is not None


def packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs matrices of a dtype: where it multiplies 16 bits as they are."""
    return dtype in (torch.bfloat16, torch.float16) and has(dtype)


# --- forms -------------------------------------------------------------------


def packed(weight: torch.Tensor) -> Formed:
    """The form of a weight [F, D], or of experts' [Y, F, D], that `linear` and `grouped` take: see the top."""
    features, depth = weight.shape[-2:]
    if not weight.numel():
        return weight
    if compiled(weight.dtype):
        pairs = 2 if weight.dtype == torch.int8 else 1
        return _panels(weight, pairs) if features % PANEL == 0 and depth % pairs == 0 else weight
    if not packs(weight.dtype):
        return weight
    return one_dnn(weight) if weight.dim() == 2 else tuple(one_dnn(expert) for expert in weight)


def one_dnn(weight: torch.Tensor) -> torch.Tensor:
    """A weight [F, D] in blocks of oneDNN's choice: opaque, only its products may read it."""
    made: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return made


def _panels(weight: torch.Tensor, pairs: int) -> torch.Tensor:
    """Experts' panels one behind the other are the panels of all their features."""
    weight = weight.contiguous()
    *experts, features, depth = weight.shape
    made = weight.new_empty(*experts, features // PANEL, depth // pairs, PANEL, *[pairs] * (pairs > 1))
    pack, _ = _functions()
    unit = weight.element_size() * pairs
    rows = weight.numel() // depth
    pack(((weight,), (made,)), unit, rows, depth // pairs, torch.get_num_threads())
    return made


# --- products ----------------------------------------------------------------


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x` [T, D] times a weight [F, D] transposed, as `packed` has it -> [T, F], in the dtype of `x`."""
    (out,) = linears((x,), (weight,))
    return out


def linears(xs: Tensors, weights: Tensors) -> Tensors:
    """`linear` of every rank."""
    weight = weights[0]
    if weight.layout is not torch.strided:
        multiply = torch.ops.mkldnn._linear_pointwise
        return [multiply(x, weight, None, "none", [], "") for x, weight in zip(xs, weights, strict=True)]
    if weight.dim() == 2:
        return [_linear(x, weight) for x, weight in zip(xs, weights, strict=True)]
    return _by_panels(xs, weights, None, None)


def grouped(rows: Tensors, weights: Sequence[Formed], counts: Tensors) -> Tensors:
    """Of every rank, `rows` [Z, D] times the weight of their expert, [Y, F, D] as `packed` has it -> [Z, F].

    The first counts[0] rows are of the first expert, and so on; rows behind the last count are left as they come.
    """
    panels = [weight for weight in weights if isinstance(weight, torch.Tensor) and weight.dim() == 4]
    if panels:
        return _by_panels(rows, panels, None, counts)
    return [_grouped(*mine) for mine in zip(rows, weights, counts, strict=True)]


def _grouped(rows: torch.Tensor, weight: Formed, counts: torch.Tensor) -> torch.Tensor:
    features = weight.shape[1] if isinstance(weight, torch.Tensor) else len(weight[0])
    return by_expert(rows, features, counts, lambda some, y: linear(some, weight[y]))


def by_expert(
    rows: torch.Tensor, features: int, counts: torch.Tensor, product: Callable[[torch.Tensor, int], torch.Tensor]
) -> torch.Tensor:
    """`product` of the rows of each expert that has some, and its number -> [Z, F]; see `grouped`."""
    out, first = rows.new_empty(len(rows), features), 0
    for y, count in enumerate(counts.tolist()):
        if count:
            out[first : first + count] = product(rows[first : first + count], y)
        first += count
    return out


def quantized(xs: Tensors, weights: Tensors, scales: Tensors, counts: Tensors | None) -> Tensors:
    """`linears`, or with counts `grouped`, with int8 panels and `scale` [F] or [Y, F]: see `ops.QuantLinear`."""
    return _by_panels(xs, weights, [scale.contiguous() for scale in scales], counts)


def in_panels(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether an int8 weight is kept in panels, and `quantized` takes it beside such activations."""
    return x.dtype in kernel.FORMATS and weight.dim() >= 4


def unpacked(weight: torch.Tensor) -> torch.Tensor:
    """An int8 weight [.., F, D] as it was, which beside float64 activations it must be."""
    return weight.transpose(-3, -2).flatten(-2).flatten(-3, -2) if weight.dim() >= 4 else weight


def of_heads(xs: Tensors, weights: Tensors, outs: Tensors | None = None, *, flat: bool = False) -> Tensors:
    """Of every rank, `x` [T, N, D] times a weight of each head [N, D, F], as it is -> [T, N, F], `flat` [T, N * F].

    `x` may be [T, N * A] of contiguous rows, where the first D of a head's A features are taken.  `outs`: where to,
    [T, N, F] with features side by side.
    """
    x, weight = xs[0], weights[0]
    tokens, (heads, depth, features) = len(x), weight.shape
    if not (compiled(x.dtype) and features % PANEL == 0 and weight.stride(2) == 1):
        made = [_of_heads(*mine) for mine in zip(xs, weights, strict=True)]
        if outs is not None:
            return [out.copy_(one) for out, one in zip(outs, made, strict=True)]
        return [one.flatten(1) for one in made] if flat else made
    if x.stride(-1) != 1:
        xs = [x.contiguous() for x in xs]
        x = xs[0]
    if outs is None:
        outs = kernel.room(xs, tokens, heads * features) if flat else kernel.room(xs, tokens, heads, features)
    out = outs[0]
    if out.numel():
        of_x = (x.shape[1] // heads if x.dim() == 2 else x.stride(1)), x.stride(0)
        of_out = (features if flat else out.stride(1)), out.stride(0)
        strides = *of_x, weight.stride(0), PANEL, weight.stride(1), *of_out
        _call(xs, weights, None, outs, None, strides, (heads, tokens, features, depth))
    return outs


def _by_panels(xs: Tensors, weights: Tensors, scales: Tensors | None, counts: Tensors | None) -> Tensors:
    """Products with panels [F / 16, ..], or with counts those of experts, whose rows lie one behind the other."""
    x, weight = xs[0], weights[0]
    if x.stride(-1) != 1:
        xs = [x.contiguous() for x in xs]
        x = xs[0]
    groups, expert = (1, 0) if counts is None else (len(weight), weight.stride(0))
    panels, panel = (weight.shape[0], weight.stride(0)) if counts is None else (weight.shape[1], weight.stride(1))
    outs = kernel.room(xs, len(x), panels * PANEL)
    if outs[0].numel():
        strides = 0, x.stride(0), expert, panel, PANEL if scales is None else 2 * PANEL, 0, panels * PANEL
        _call(xs, weights, scales, outs, counts, strides, (groups, len(x), panels * PANEL, x.shape[1]))
    return outs


def _call(
    xs: Tensors,
    weights: Tensors,
    scales: Tensors | None,
    outs: Tensors,
    counts: Tensors | None,
    strides: tuple[int, ...],
    sizes: tuple[int, int, int, int],
) -> None:
    """The kernel: strides of a group first, then of a row, or of a panel and a step, of `xs`, `weights` and `outs`.

    `sizes`: groups, rows, features and depth.
    """
    _, product = _functions()
    none = (0,) * len(xs)
    of_call = kernel.FORMATS[xs[0].dtype], *strides, *sizes, torch.get_num_threads()
    product((xs, weights, scales or none, outs, counts or none), *of_call)


@cache
def _functions() -> tuple[kernel.Function, kernel.Function]:
    """The kernel's functions that pack and that multiply, for the registers that there are."""
    lanes = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8
    pack = kernel.function(f"mla_fx_pack_{lanes}", "iiii")
    product = kernel.function(f"mla_fx_linear_{lanes}", "i" * 13)
    return pack, product


# --- without a kernel --------------------------------------------------------


def _linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x` [T, D] times `weight` [F, D] transposed.

    Without 16-bit products the library multiplies such numbers one by one: from a few rows on it is faster to widen a
    piece of the weight that stays in the cache, multiply in float32 and round once.
    """
    if has(x.dtype) or len(x) < ROWS:
        return functional.linear(x, weight)
    out, wide = x.new_empty(len(x), len(weight)), x.float()
    rows = max(1, PIECE // max(1, weight.shape[1]))
    for at in range(0, len(weight), rows):
        out[:, at : at + rows] = functional.linear(wide, weight[at : at + rows].float())
    return out


def _of_heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same for each head; see `of_heads`."""
    if x.dim() == 2:
        x = x.view(len(x), len(weight), x.shape[1] // len(weight))[..., : weight.shape[1]]
    x = x.transpose(0, 1)
    if has(x.dtype):
        return torch.bmm(x, weight).transpose(0, 1).contiguous()
    out = x.new_empty(x.shape[1], len(x), weight.shape[2])
    heads = max(1, PIECE // max(1, weight[0].numel()))
    for at in range(0, len(weight), heads):
        some = slice(at, at + heads)
        out[:, some] = torch.bmm(x[some].float(), weight[some].float()).transpose(0, 1)
    return out
