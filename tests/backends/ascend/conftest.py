"""The Ascend backend on the emulated CANN: one machine a process, as it came from the shop for every test."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from mla_fx import orchestrations
from mla_fx.backends import Backend, Collective, InProcess, Run, ascend, compiled, device
from mla_fx.backends.ascend.calls import release as calls_release
from mla_fx.backends.ascend.emulator import Machine, emulate
from mla_fx.backends.ascend.emulator.build import WHAT, wheel
from mla_fx.backends.ascend.emulator.releases import RELEASES
from mla_fx.effects import Aval, InputError, Op, Program, bind, on_host, schedule, trace
from mla_fx.effects.aval import operand
from tests.ops.conftest import aval, fields
from tests.processes import Nursery


def why_not() -> str | None:
    """Why nothing can be emulated here, None where it can."""
    try:
        wheel()
        compiled.compiler(WHAT)
    except InputError as error:
        return str(error)
    return None


@pytest.fixture(scope="session")
def machine(pytestconfig: pytest.Config) -> Machine:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    return emulate(cann=pytestconfig.getoption("--cann"))


@pytest.fixture
def emulator(machine: Machine, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Machine]:
    """Of the release that this run is on (--cann), or of the one that a test is marked for."""
    machine.play(RELEASES[request.config.getoption("--cann")])
    if (marker := request.node.get_closest_marker("cann")) is not None:
        play(machine, monkeypatch, marker.args[0])
    machine.seed(0)
    yield machine
    machine.recover()
    machine.synchronize()


@pytest.fixture(scope="session")
def processes(processes: Nursery, pytestconfig: pytest.Config) -> Nursery:
    """Where processes that emulate a device each are forked from."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    return evolve(processes, emulated=pytestconfig.getoption("--cann"))


@pytest.fixture(params=RELEASES)
def release(emulator: Machine, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Each release of CANN."""
    play(emulator, monkeypatch, request.param)
    return str(request.param)


def play(machine: Machine, monkeypatch: pytest.MonkeyPatch, cann: str) -> None:
    """Play a release to the wheel and tell our rules.  (The wheel itself reads it once a process.)"""
    release = RELEASES[cann]
    machine.play(release)
    monkeypatch.setattr(calls_release, "cann", lambda: calls_release.number(release.version))


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


def given_to(op: Op, operands: Sequence[Any], layout: Callable[[Any], Any] = to_device) -> list[Any]:
    """Operands on the device in the form that the rule wants: states contiguous, the rest as `layout` puts it."""
    forms = ascend.TABLE.forms.get(type(op), {})
    put = [to_device(x) if name in op.writes else layout(x) for name, x in zip(op.operands, operands, strict=True)]
    return [forms[name](x) if name in forms else x for name, x in zip(op.operands, put, strict=True)]


def ask(op: Op, *operands: Any, rank: int = 0) -> tuple[torch.Tensor, ...]:
    """The Ascend rule on operands that are on the device."""
    results = ascend.TABLE.rules[type(op)](*operands, run=Run(rank, device("npu")), **fields(op))
    assert isinstance(results, tuple)
    return results


def on_device(
    op: Op, *operands: Any, layout: Callable[[Any], Any] = to_device, rank: int = 0
) -> tuple[torch.Tensor, ...]:
    """The Ascend rule, its results on the host; states are contiguous, the rest as `layout` puts it."""
    given = given_to(op, operands, layout)
    results = ask(op, *given, rank=rank)
    assert len(results) == len(op.results)
    versions = {result: given[position] for position, result in op.written().items()}
    memory = {t.untyped_storage().data_ptr() for t in given if isinstance(t, torch.Tensor)}
    for k, result in enumerate(results):
        if k in versions:
            assert result is versions[k]
        else:
            assert result.is_contiguous()
            assert not result.numel() or result.untyped_storage().data_ptr() not in memory
    return tuple(result.cpu() for result in results)


def over_ranks(op: Op, operands: Sequence[tuple[torch.Tensor, ...]]) -> list[tuple[torch.Tensor, ...]]:
    """A collective for all ranks on one stream: what each sends, moved, is what each receives."""
    rule, runs = ascend.TABLE.rules[type(op)], [Run(rank, device("npu")) for rank in range(len(operands))]
    assert isinstance(rule, Collective) and op.communicates
    given = [tuple(map(to_device, mine)) for mine in operands]
    sent = [rule.send(*mine, run=run, **fields(op)) for mine, run in zip(given, runs, strict=True)]
    assert all(one.is_contiguous() for one in sent)
    moved = InProcess(len(operands)).move(op.communicates, sent, group="tp")
    found = [
        rule.receive(brought, *mine, run=run, **fields(op))
        for brought, mine, run in zip(moved, given, runs, strict=True)
    ]
    return [tuple(result.cpu() for result in of_rank) for of_rank in found]


def refused(op: Op, *operands: torch.Tensor | tuple[int, ...]) -> str:
    """Why a program of nothing but the op on such operands is not compiled."""
    ranks = group.size if (group := op.group_of()) else 1
    with pytest.raises(InputError) as caught:
        Backend("ascend", ascend.TABLE, InProcess(ranks), device("npu")).compile(program_of(op, map(aval, operands)))
    return str(caught.value)


def program_of(op: Op, avals: Iterable[Aval]) -> Program:
    """A program of nothing but an op."""
    named = zip(op.operands.items(), avals, strict=True)
    inputs = {name: on_host(of) if operand(text).on_host else of for (name, text), of in named}
    return schedule(trace(lambda **values: bind(op, *values.values()), op.name, **inputs), orchestrations.serial)


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
