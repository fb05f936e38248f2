"""Results of the device against those of the host: nearness by the largest deviation, or the same bits."""

import math
from collections.abc import Sequence

import torch

from mla_fx.backends.ascend.probe.point import Outcome

#: How far 16 bits may be off, as a part of the largest number that is right: rounded once, weights rounded before.
BF16 = 2**-6
#: The same for float32 from products of 16-bit numbers.
WIDE = 2**-9


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal numbers on the host, the same in every run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(dtype)


def poison(*shape: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """Leave NaN in memory that the allocator is likely to hand out for a result of that shape next."""
    torch.full(shape, math.nan, dtype=dtype, device="npu")
    torch.get_device_module("npu").synchronize()


def near(limit: float, **pairs: tuple[torch.Tensor, torch.Tensor]) -> Outcome:
    """Each pair is (of the device, right); infinities and NaN must coincide, numbers be within the limit."""
    figures: dict[str, float] = {}
    for name, (got, want) in pairs.items():
        seen, right = got.detach().cpu().double(), want.double()
        if seen.shape != right.shape:
            return Outcome("differs", f"{name}: must be {list(right.shape)}: got {list(seen.shape)}")
        finite = right.isfinite()
        special = (seen == right) | (seen.isnan() & right.isnan())
        wrong = ~torch.where(finite, seen.isfinite(), special)
        if wrong.any():
            return Outcome("differs", _first(name, wrong, seen, right), figures)
        size = right[finite].abs().max().item() if finite.any() else 0.0
        off = torch.where(finite, (seen - right).abs(), 0.0)
        figures[name] = off.max().item() / size if size else off.max().item()
        if figures[name] > limit:
            return Outcome("differs", _first(name, off == off.max(), seen, right), figures)
    return Outcome("holds", "", figures)


def same(**pairs: tuple[torch.Tensor, torch.Tensor]) -> Outcome:
    """The same shape, dtype and bits, NaN with its payload too."""
    for name, (got, want) in pairs.items():
        seen = got.detach().cpu()
        if (seen.shape, seen.dtype) != (want.shape, want.dtype):
            return Outcome("differs", f"{name}: must be {want.dtype}{list(want.shape)}: got {seen.dtype}{seen.shape}")
        wrong = (_bits(seen) != _bits(want)).view(*want.shape, -1).any(-1)
        if wrong.any():
            return Outcome("differs", _first(name, wrong, seen, want))
    return Outcome("holds")


def all_of(outcomes: Sequence[Outcome]) -> Outcome:
    """The first that does not hold, or all figures together."""
    for outcome in outcomes:
        if outcome.verdict != "holds":
            return outcome
    figures = {name: value for outcome in outcomes for name, value in outcome.figures.items()}
    return Outcome("holds", "; ".join(o.detail for o in outcomes if o.detail), figures)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _first(name: str, wrong: torch.Tensor, seen: torch.Tensor, right: torch.Tensor) -> str:
    place = wrong.nonzero()[0].tolist()
    index = tuple(place)
    return f"{name}{place}: must be {right[index].item():.6g}: got {seen[index].item():.6g}"
