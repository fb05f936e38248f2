"""Points 4 and 5: the merge of partial attentions, and the product with a matrix for each head."""

import math
from collections.abc import Callable, Sequence

import torch

from mla_fx.backends.ascend.calls.projection import fits
from mla_fx.backends.ascend.combine import parts
from mla_fx.backends.ascend.probe.compare import BF16, WIDE, all_of, drawn, near
from mla_fx.backends.ascend.probe.point import Cann, Case, Outcome, Point, Site, Verdicts, always, failing, never

_ROWS, _LATENT = 6, 512


def _merge(
    count: int,
    special: dict[tuple[int, int], float] | None = None,
    laid: Callable[[torch.Tensor], Sequence[torch.Tensor]] = list,
    *,
    with_lse: bool = False,
) -> Outcome:
    """`special` LSEs at (part, row); `laid` puts all parts on the device and gives them one by one."""
    rows, lse = drawn(count, _ROWS, _LATENT, seed=4), drawn(count, _ROWS, seed=5, dtype=torch.float32)
    for (part, row), value in (special or {}).items():
        lse[part, row], rows[part, row] = value, 0
    each = lse.double().masked_fill(lse.isinf(), -math.inf)
    total = torch.logsumexp(each, 0)
    empty = total.isinf()
    weights = torch.exp(each - total)
    right = (weights.unsqueeze(-1) * rows.double()).sum(0)
    given = list(lse.npu())  # type: ignore[attr-defined]
    out, merged = torch.ops.npu.npu_attention_update(given, list(laid(rows)), int(with_lse))
    found = [near(BF16, out=(out, right.masked_fill(empty.unsqueeze(-1), math.nan)))]
    if with_lse:
        found.append(near(WIDE, lse=(merged, total)))
    return all_of(found)


def _side_by_side(rows: torch.Tensor) -> Sequence[torch.Tensor]:
    """Views with an offset, each contiguous."""
    return list(rows.npu())  # type: ignore[attr-defined]


def _interleaved(rows: torch.Tensor) -> Sequence[torch.Tensor]:
    """Views with the rows of the other parts between theirs."""
    between = rows.transpose(0, 1).contiguous().npu()  # type: ignore[attr-defined]
    return list(between.unbind(1))


def _apart(rows: torch.Tensor) -> Sequence[torch.Tensor]:
    return [part.npu() for part in rows]


def _merge_means(found: Verdicts, cann: Cann) -> str:
    said = []
    if bad := failing(found, ("one +inf", "one -inf")):
        said.append(f"combine.py: LSEs must be made finite before the merge: {', '.join(bad)} fails.")
    if bad := failing(found, ("views with an offset", "9 parts")):
        said.append(f"combine.py: the merge must be plain torch here, or of fewer parts: {', '.join(bad)} fails.")
    if "LSE of the result" in failing(found):
        said.append("combine.py: LSEs of merged groups must be computed beside the operator.")
    if "all +inf and -inf" in failing(found):
        said.append("A row that no part saw is not NaN: the mask behind the merge may go, once 0 is certain.")
    if "strided" in failing(found):
        said.append("Parts must be contiguous, as combine.py has them.")
    most = parts(cann)
    if (found["17 parts"] == "holds") != (most >= 17) and found["17 parts"] != "not run":
        said.append(f"combine.parts says {most} for CANN {cann[0]}.{cann[1]}: 17 parts gave {found['17 parts']}.")
    return " ".join(said) or f"The merge stays as it is, {most} parts at once."


def _product(heads: int, inner: int, features: int) -> Outcome:
    """[M, B, K] x [B, K, N] -> [M, B, N], rows first in and out."""
    x, weight = drawn(3, heads, inner, seed=6), drawn(heads, inner, features, seed=7)
    right = torch.bmm(x.double().transpose(0, 1), weight.double()).transpose(0, 1)
    on_device = (x.npu(), weight.npu())  # type: ignore[attr-defined]
    out = torch.ops.npu.npu_transpose_batchmatmul(*on_device, perm_x1=(1, 0, 2), perm_y=(1, 0, 2))
    return near(BF16, out=(out, right))


def _product_case(heads: int, inner: int, features: int) -> Case:
    def run(site: Site) -> Outcome:
        return _product(heads, inner, features)

    def needs(cann: Cann) -> bool:
        return fits(heads, inner, features, cann)

    return Case(f"{heads} heads, {inner} x {features}", run, needs)


def _product_means(found: Verdicts, cann: Cann) -> str:
    bad = failing(found)
    needed = {case.name for case in _PRODUCTS if case.needs(cann)}
    wrong = [name for name in bad if name in needed]
    more = [name for name, verdict in found.items() if verdict == "holds" and name not in needed]
    said = []
    if wrong:
        said.append(f"calls/projection.py: `fits` must say no to {', '.join(wrong)}.")
    if more:
        said.append(f"calls/projection.py: `fits` may say yes to {', '.join(more)}.")
    if not said:
        said.append("`fits` of calls/projection.py is right; what it refuses runs as a bmm between two transposes.")
    return " ".join(said)


_SIZES = (64, 128, 192, 512)
_PRODUCTS = (*(_product_case(4, k, n) for k in _SIZES for n in _SIZES), _product_case(128, 512, 128))

POINTS = (
    Point(
        4,
        "merge of parts",
        "npu_attention_update of bf16 parts: infinite LSEs, views, more than 8 and than 16 parts",
        (
            Case("one +inf", lambda site: _merge(3, {(1, 2): math.inf}, _apart)),
            Case("one -inf", lambda site: _merge(3, {(1, 2): -math.inf}, _apart)),
            Case(
                "all +inf and -inf",
                lambda site: _merge(
                    2, {(0, 2): math.inf, (1, 2): -math.inf, (0, 3): math.inf, (1, 3): math.inf}, _apart
                ),
                never,
            ),
            Case("views with an offset", lambda site: _merge(3, None, _side_by_side)),
            Case("strided", lambda site: _merge(3, None, _interleaved), never),
            Case("LSE of the result", lambda site: _merge(3, {(0, 1): -math.inf}, _apart, with_lse=True), always),
            Case("9 parts", lambda site: _merge(9, None, _apart)),
            Case("17 parts", lambda site: _merge(17, None, _apart), lambda cann: parts(cann) >= 17),
        ),
        _merge_means,
    ),
    Point(
        5,
        "product for each head",
        "npu_transpose_batchmatmul, K x N in bf16, rows first in and out",
        _PRODUCTS,
        _product_means,
    ),
)
