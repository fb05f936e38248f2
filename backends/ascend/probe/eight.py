"""Points 15 and 16: 8-bit weights in FRACTAL_NZ, and the activation between two products in 8 bits."""

import math
from collections.abc import Callable
from typing import Any

import torch

from mla_fx.backends.ascend.calls.experts import product_swiglu_quantised, swiglu_quantised
from mla_fx.backends.ascend.calls.fractal import fractal, matrix, plain, since
from mla_fx.backends.ascend.calls.grouped import grouped
from mla_fx.backends.ascend.probe.compare import BF16, WIDE, near, same
from mla_fx.backends.ascend.probe.point import Cann, Case, Outcome, Point, Site, Verdicts, always, failing

_COUNTS = (2, 0, 1)
_OWNERS = [expert for expert, count in enumerate(_COUNTS) for _ in range(count)]
_ROWS, _INNER, _FEATURES = len(_OWNERS), 64, 128


def _integers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


def _steps(*shape: int, seed: int) -> torch.Tensor:
    """Scales of a size that keeps sums of products near 1."""
    drawn = 0.5 + torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    return drawn / math.sqrt(127**2 * _INNER)


def _sums(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Of rows [Z, D] and the weights [Y, F, D] of their experts, exact."""
    return torch.stack([weight[owner].long() @ row.long() for row, owner in zip(rows, _OWNERS, strict=True)])


def _cast_back(site: Site) -> Outcome:
    weight = _integers(_FEATURES, _INNER, seed=16)
    return same(weight=(plain(fractal(weight.npu())), weight))  # type: ignore[attr-defined]


def _product(site: Site) -> Outcome:
    rows, weight = _integers(_ROWS, _INNER, seed=17), _integers(_FEATURES, _INNER, seed=18)
    scale, steps = _steps(_FEATURES, seed=19), _steps(_ROWS, seed=20)
    right = (rows.double() @ weight.double().T) * scale.double() * steps.double().unsqueeze(1)
    scales = {"scale": scale.npu(), "pertoken_scale": steps.npu()}  # type: ignore[attr-defined]
    given = (rows.npu(), matrix(fractal(weight.npu())))  # type: ignore[attr-defined]
    return near(BF16, out=(torch.ops.npu.npu_quant_matmul(*given, **scales, output_dtype=torch.bfloat16), right))


def _grouped(site: Site) -> Outcome:
    rows, weight = _integers(_ROWS, _INNER, seed=21), _integers(len(_COUNTS), _FEATURES, _INNER, seed=22)
    scale, steps = _steps(len(_COUNTS), _FEATURES, seed=23).to(torch.bfloat16), _steps(_ROWS, seed=24)
    right = _sums(rows, weight).double() * scale[_OWNERS].double() * steps.double().unsqueeze(1)
    given = (rows.npu(), fractal(weight.npu()), torch.tensor(_COUNTS).npu())  # type: ignore[attr-defined]
    scales: dict[str, Any] = {"scale": [scale.npu()], "per_token_scale": [steps.npu()]}  # type: ignore[attr-defined]
    return near(BF16, out=(grouped(*given, **scales, output_dtype=torch.bfloat16), right))


def _activated(act: torch.Tensor, of_act: torch.Tensor, wide: torch.Tensor) -> Outcome:
    """The activation of `wide` [Z, 2 F], gate first, to half a step of its row and the rounding of that."""
    gate, up = wide.chunk(2, 1)
    right = torch.nn.functional.silu(gate) * up
    steps = right.abs().amax(1) / 127
    back = act.cpu().double() * of_act.cpu().double().unsqueeze(1)
    in_steps = (back / steps.unsqueeze(1), right / steps.unsqueeze(1))
    found = near(0.5 / 127 + WIDE, act=in_steps)
    return found if found.verdict != "holds" else near(WIDE, steps=(of_act, steps))


def _activation(site: Site, *, grouped_by: bool) -> Outcome:
    """Of sums that are there; by experts, or one for all rows."""
    experts = len(_COUNTS) if grouped_by else 1
    sums = _sums(_integers(_ROWS, _INNER, seed=25), _integers(len(_COUNTS), _FEATURES, _INNER, seed=26))
    scale, steps = _steps(experts, _FEATURES, seed=27), _steps(_ROWS, seed=28)
    wide = sums.double() * scale[_OWNERS if grouped_by else [0] * _ROWS].double() * steps.double().unsqueeze(1)
    given = (sums.to(torch.int32), scale if grouped_by else scale[0], steps)
    found, by_row, of_row = (part.npu() for part in given)  # type: ignore[attr-defined]
    counts = torch.tensor(_COUNTS).npu() if grouped_by else None  # type: ignore[attr-defined]
    return _activated(*swiglu_quantised(found, by_row, of_row, counts), wide)


def _product_activation(site: Site) -> Outcome:
    rows, weight = _integers(_ROWS, _INNER, seed=29), _integers(len(_COUNTS), _FEATURES, _INNER, seed=30)
    scale, steps = _steps(len(_COUNTS), _FEATURES, seed=31), _steps(_ROWS, seed=32)
    wide = _sums(rows, weight).double() * scale[_OWNERS].double() * steps.double().unsqueeze(1)
    rest = (scale.npu(), steps.npu(), torch.tensor(_COUNTS).npu())  # type: ignore[attr-defined]
    given = (rows.npu(), fractal(weight.npu()))  # type: ignore[attr-defined]
    return _activated(*product_swiglu_quantised(*given, *rest), wide)


def _in_format(name: str, run: Callable[[Site], Outcome]) -> Case:
    """A case that needs a weight in the format."""

    def asked(site: Site) -> Outcome:
        if not since(site.cann):
            return Outcome("not run", "weights stay as they are before CANN 9.1")
        return run(site)

    return Case(name, asked, since)


def _fractal_means(found: Verdicts, cann: Cann) -> str:
    if bad := failing(found):
        return f"calls/fractal.py: 8-bit weights must stay as they are here: {', '.join(bad)} fails."
    return "8-bit weights are kept in FRACTAL_NZ, from CANN 9.1 on."


def _activation_means(found: Verdicts, cann: Cann) -> str:
    said = []
    if "product and activation" in failing(found):
        said.append("quant_experts.py: the product must stay apart from the activation.")
    if bad := failing(found, ("of experts", "of all rows")):
        said.append(f"quant_experts.py, quant_mlp.py: the activation must be by its parts: {', '.join(bad)} fails.")
    return " ".join(said) or "The activation between two products in 8 bits stays one operator, or none."


POINTS = (
    Point(
        15,
        "weights in FRACTAL_NZ",
        "8-bit weights cast by npu_format_cast, and products that take them",
        (
            _in_format("cast and back", _cast_back),
            _in_format("product", _product),
            _in_format("grouped product", _grouped),
        ),
        _fractal_means,
    ),
    Point(
        16,
        "activation in 8 bits",
        "npu_dequant_swiglu_quant of sums, and npu_grouped_matmul_swiglu_quant_v2 of rows: steps, and rows scaled back",
        (
            Case("of experts", lambda site: _activation(site, grouped_by=True), always),
            Case("of all rows", lambda site: _activation(site, grouped_by=False), always),
            _in_format("product and activation", _product_activation),
        ),
        _activation_means,
    ),
)
