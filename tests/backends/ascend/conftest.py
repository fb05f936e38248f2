"""The Ascend backend on the emulated CANN: one machine a process, as it came from the shop for every test."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from mla_fx.backends import ascend
from mla_fx.backends.ascend.emulator import Machine, emulate
from mla_fx.backends.ascend.emulator.build import compiler, wheel
from mla_fx.backends.torch_streams import Scratch
from mla_fx.effects import InputError, Op


def why_not() -> str | None:
    """Why nothing can be emulated here, None where it can."""
    try:
        wheel()
        compiler()
    except InputError as error:
        return str(error)
    return None


@pytest.fixture(scope="session")
def machine() -> Machine:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    return emulate()


@pytest.fixture
def emulator(machine: Machine) -> Iterator[Machine]:
    machine.seed(0)
    yield machine
    machine.recover()
    machine.synchronize()


def to_device(operand: Any) -> Any:
    return operand.npu() if isinstance(operand, torch.Tensor) else operand


def with_gaps(operand: Any) -> Any:
    """The same values on the device, with gaps between features and the first two axes swapped in memory."""
    if not isinstance(operand, torch.Tensor):
        return operand
    axes = [1, 0, *range(2, operand.dim())] if operand.dim() > 1 else [0]
    shape = [operand.shape[axis] for axis in axes]
    room = torch.zeros([*shape[:-1], 2 * shape[-1]], dtype=operand.dtype, device="npu")[..., ::2].permute(axes)
    return room.copy_(operand)


def on_device(
    op: Op, *operands: Any, layout: Callable[[Any], Any] = to_device, **rank: int
) -> tuple[torch.Tensor, ...]:
    """The Ascend rule, its results on the host; states are contiguous, the rest as `layout` puts it."""
    given = tuple(to_device(t) if k in op.writes else layout(t) for k, t in enumerate(operands))
    scratch = {name: Scratch() for name in op.uses}
    results = ascend.RULES[type(op)](*given, **attrs.asdict(op), **rank, **scratch)
    assert isinstance(results, tuple) and len(results) == len(op.results)
    for k, result in enumerate(results):
        states = [given[operand] for operand, index in op.writes.items() if index == k]
        assert result is states[0] if states else result.is_contiguous()
        assert (
            states
            or not result.numel()
            or all(
                result.untyped_storage().data_ptr() != t.untyped_storage().data_ptr()
                for t in given
                if isinstance(t, torch.Tensor)
            )
        )
    return tuple(result.cpu() for result in results)


def over_ranks(op: Op, operands: Sequence[tuple[torch.Tensor, ...]]) -> list[tuple[torch.Tensor, ...]]:
    """A collective's rule asked as the interpreter asks it, all on one stream."""
    turns = list(ascend.RULES[type(op)]([tuple(map(to_device, given)) for given in operands], **attrs.asdict(op)))
    assert len(turns) % len(operands) == 0
    *preparing, results = (turns[k : k + len(operands)] for k in range(0, len(turns), len(operands)))
    assert all(turn is None for turns_of_round in preparing for turn in turns_of_round)
    return [tuple(result.cpu() for result in of_rank) for of_rank in results]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


#: One rounding of the result; what float32 accumulation may add to sums of size 1.
TOLERANCE = {torch.bfloat16: (2**-8, 2e-5), torch.float16: (2**-11, 2e-5), torch.float32: (2e-5, 2e-5)}


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    relative, absolute = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), want.double(), rtol=relative, atol=absolute, equal_nan=True)


def random(rng: np.random.Generator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.as_tensor(rng.standard_normal(shape)).to(dtype)
