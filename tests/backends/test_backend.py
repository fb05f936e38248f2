"""Compiling: one program for many steps, drops that free, a table of one's own, and what is refused."""

import weakref
from typing import ClassVar

import pytest
import torch
from attrs import frozen

from mla_fx import backends, orchestrations
from mla_fx.backends import Backend, MissingRuleError, Run
from mla_fx.effects import Aval, InputError, LawError, Op, Step, Wait, bind, ops, schedule, trace
from mla_fx.testing import assert_runs_alike, backend  # noqa: F401
from tests.setups import ANYWHERE, Setup

SETUP = Setup()
PROGRAM = schedule(SETUP.step, orchestrations.attention_aside)


def test_one_program_serves_many_lengths(backend):  # noqa: F811
    """Steps that grow over block borders, a request that stays away, another that brings two tokens."""
    made = backend(ranks=2)
    run = SETUP.compiled(made, PROGRAM)
    hidden = made.put(SETUP.hidden())
    caches = made.put(SETUP.caches(), copy=True)
    exact = backends.get("reference", ranks=2)
    right = SETUP.compiled(exact, schedule(SETUP.step, orchestrations.serial))
    expected_caches = exact.put(SETUP.caches(), copy=True)
    lengths = [0, 0]
    for step in range(12):
        query = ((1, 2), (3, 0), (0, 1))[step % 3]
        batches = SETUP.batches(tuple(lengths), query)
        out, caches = run(caches, hidden, batches)
        expected, expected_caches = right(*exact.put((expected_caches, SETUP.hidden(), batches)))
        torch.testing.assert_close(out[0].double(), expected[0], rtol=1e-4, atol=1e-4)
        lengths = [length + new for length, new in zip(lengths, query, strict=True)]


def test_runs_alike_everywhere():
    assert_runs_alike(PROGRAM, *SETUP.arguments(), params=SETUP.params(), ranks=2, rtol=1e-4, atol=1e-4)
    with pytest.raises(AssertionError):
        assert_runs_alike(PROGRAM, *SETUP.arguments(), params=SETUP.params(), ranks=2, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["reference"], indirect=True)
def test_fixture_can_be_told_which(backend):  # noqa: F811
    assert backend(ranks=2).name == "reference"


@frozen
class Square(Op):
    """`x` [T] -> [T]."""

    operands: ClassVar = {"x": "T"}

    def shape_rule(self, axes, dtype):
        return (Aval((axes["T"],), dtype),)


def squares(count: int) -> Step:
    def squared(x):
        for _ in range(count):
            (x,) = bind(Square(), x)
        return x

    return trace(squared, "squares", x=Aval((3,), "fp32"))


def square(x: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
    return (x * x,)


def test_a_table_of_ones_own():
    program = schedule(squares(2), orchestrations.serial)
    run = Backend("mine", {Square: square}).compile(program)
    for _ in range(2):  # the first run looks at what the rules give
        assert run([torch.tensor([1.0, 2.0, 3.0])])[0].tolist() == [1.0, 16.0, 81.0]
    more = backends.get("cpu").with_rules({Square: square})
    assert more.compile(program)([torch.ones(3)])[0].tolist() == [1.0] * 3


def test_drops_free_as_they_are_issued():
    """While the last op runs, all but its operand are gone; in the first run as in all others."""
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def rule(x: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
        alive.append(sum(ref() is not None for ref in made))
        out = x * x
        made.append(weakref.ref(out))
        return (out,)

    run = Backend("mine", {Square: rule}).compile(schedule(squares(5), orchestrations.serial))
    for _ in range(2):
        run([torch.ones(3)])
        assert alive == [0, 1, 1, 1, 1]
        made.clear()
        alive.clear()


def test_refusals():
    with pytest.raises(MissingRuleError, match="backend cpu has no rule for square"):
        backends.get("cpu").compile(schedule(squares(1), orchestrations.serial))
    with pytest.raises(InputError, match=r"gather_heads: is for the 2 ranks of dcp\[2\]: got a backend of tp=4"):
        backends.get("cpu", ranks=4).compile(PROGRAM)
    with pytest.raises(InputError, match="backend: must be one of reference, cpu, ascend, cuda: got 'gpu'"):
        backends.get("gpu")
    with pytest.raises(InputError, match="ranks: must be an integer of at least 1, or a Layout: got 0"):
        backends.get("cpu", ranks=0)
    at = next(k for k, effect in enumerate(PROGRAM.effects) if isinstance(effect, Wait))
    with pytest.raises(LawError, match="missing order"):
        backends.get("cpu", ranks=2).compile(PROGRAM.without(at))


def test_reference_computes_in_float64_whatever_the_program_says():
    made = backends.get("reference", ranks=2)
    half = schedule(Setup(dtype="bf16").step, orchestrations.serial)
    out, caches = Setup(dtype="bf16").compiled(made, half)(*made.put(Setup(dtype="bf16").arguments()))
    assert out[0].dtype == caches[0].latent.dtype == torch.float64
    assert {aval.dtype for aval in half.with_float("fp64").avals().values()} == {"fp64", "int32", "int64"}


def test_gradients_are_not_recorded():
    caches, hidden, batches = SETUP.arguments()
    leaf = hidden[0].clone().requires_grad_()
    out, _ = SETUP.compiled(backends.get("cpu", ranks=2), PROGRAM)(caches, [leaf] * 2, batches)
    assert not out[0].requires_grad


@pytest.mark.parametrize("orchestration", ANYWHERE)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
def test_replicated_query_equals_gathered_query(dtype, orchestration):
    """Same layer, same shards; only where the other ranks' queries come from differs."""
    results = []
    for replicate in (False, True):
        setup = Setup(dtype=dtype, ranks=4, replicate_query=replicate)
        program = schedule(setup.step, orchestrations.NAMED[orchestration])
        assert any(isinstance(launch.op, ops.GatherHeads) for launch in program.launches) is not replicate
        made = backends.get("reference", ranks=4)
        out, _ = setup.compiled(made, program)(*made.put(setup.arguments()))
        results.append(out[0])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
