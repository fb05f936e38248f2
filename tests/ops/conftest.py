"""One op's rule, run on the backend and dtype of a test, with what every rule must keep."""

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from mla_fx.backends import cpu, cuda, reference
from mla_fx.backends.inputs import DTYPES
from mla_fx.backends.torch_streams import Scratch
from mla_fx.effects import Aval, Op

NAMES = {dtype: name for name, dtype in DTYPES.items()}
#: One rounding of the result, and what accumulation in the wide dtype may add to sums of size 1.
TOLERANCE = {
    torch.bfloat16: (2**-8, 1e-5),
    torch.float16: (2**-11, 1e-5),
    torch.float32: (1e-5, 1e-5),
    torch.float64: (1e-12, 1e-12),
}


def aval(operand: Any) -> Aval:
    if isinstance(operand, tuple):
        return Aval((len(operand),), "host")
    return Aval(tuple(operand.shape), NAMES[operand.dtype])


def memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@attrs.frozen
class Rules:
    """A backend's rules and the dtype a test runs them in."""

    backend: Any
    dtype: torch.dtype

    @property
    def wide(self) -> torch.dtype:
        """What LSEs and angles are in."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def on_streams(self) -> bool:
        """Whether rules are called as `mla_fx.backends.torch_streams` calls them."""
        return self.backend is cuda

    def tensor(self, values: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values)).to(dtype or self.dtype)

    def random(self, rng: np.random.Generator, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.tensor(rng.standard_normal(shape), dtype)

    def __call__(self, op: Op, *operands: Any, **rank: int) -> tuple[torch.Tensor, ...]:
        """Run the rule; hold shapes and dtypes against the descriptor, and memory against the operands."""
        assert not op.communicates
        scratch = {name: Scratch() for name in op.uses} if self.on_streams else {}
        results = self.backend.RULES[type(op)](*operands, **attrs.asdict(op), **rank, **scratch)
        self.check(op, operands, results)
        return results

    def group(self, op: Op, operands: Sequence[tuple[torch.Tensor, ...]]) -> list[tuple[torch.Tensor, ...]]:
        """Run a collective for all ranks."""
        results = self.backend.RULES[type(op)](operands, **attrs.asdict(op))
        if self.on_streams:
            results = last_turns(results, len(operands))
        assert isinstance(results, list) and len(results) == len(operands)
        for given, got in zip(operands, results, strict=True):
            self.check(op, given, got)
        mine = [{memory(t) for t in got if t.numel()} for got in results]
        theirs = {memory(t) for given in operands for t in given}
        assert len(set().union(*mine)) == sum(map(len, mine)), "two ranks share memory"
        assert not set().union(*mine) & theirs, "a result lies in an operand of some rank"
        return results

    def check(self, op: Op, operands: Sequence[Any], results: tuple[torch.Tensor, ...]) -> None:
        assert isinstance(results, tuple) and len(results) == len(op.results)
        assert tuple(map(aval, results)) == op.infer(*map(aval, operands))
        tensors = [t for t in operands if isinstance(t, torch.Tensor)]
        for k, result in enumerate(results):
            states = [operand for operand, index in op.writes.items() if index == k]
            if states:
                assert result is operands[states[0]]
            else:
                assert result.is_contiguous()
                assert result.numel() == 0 or memory(result) not in set(map(memory, tensors))

    def close(self, got: torch.Tensor, want: Any) -> None:
        """Equal up to a rounding in the result's own dtype; NaN and infinities must coincide."""
        relative, absolute = TOLERANCE[got.dtype]
        np.testing.assert_allclose(exact(got), np.asarray(want), rtol=relative, atol=absolute)


def exact(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as float64, for an oracle."""
    return tensor.to(torch.float64).numpy()


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with gaps between rows and features, and the first two axes swapped in memory."""
    axes = [1, 0, *range(2, tensor.dim())] if tensor.dim() > 1 else [0]
    shape = [tensor.shape[a] for a in axes]
    room = torch.full([*shape[:-1], 2 * shape[-1]], -7, dtype=tensor.dtype)[..., ::2].permute(axes)
    return room.copy_(tensor)


def last_turns(turns: Iterator[tuple[torch.Tensor, ...] | None], ranks: int) -> list[tuple[torch.Tensor, ...] | None]:
    """What a collective's generator gives the ranks in its last round; in those before it gives None."""
    every = list(turns)
    assert len(every) % ranks == 0
    assert all(turn is None for turn in every[:-ranks])
    return every[-ranks:]


#: The rules of `cuda` are plain torch, and here run on tensors of the host.
RUNS = [
    (reference, "fp64"),
    *((backend, name) for backend in (cpu, cuda) for name in ("bf16", "fp16", "fp32", "fp64")),
]


@pytest.fixture(params=RUNS, ids=lambda run: f"{run[0].__name__.split('.')[-1]}-{run[1]}")
def rules(request: pytest.FixtureRequest) -> Rules:
    backend, dtype = request.param
    return Rules(backend, DTYPES[dtype])


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)
