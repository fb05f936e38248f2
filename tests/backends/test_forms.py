"""The forms of parameters: made once, when they are prepared, and kept alone where nothing wants them as they were."""

import pytest
import torch
from attrs import evolve

from mla_fx import backends, orchestrations
from mla_fx.effects import Aval, InputError, Step, bind, ops, parameters, schedule, trace

X, WEIGHT = Aval((3, 8), "fp32"), Aval((4, 8), "fp32")
NAME = "params['w']"
VALUES = {"x": torch.arange(24.0).view(3, 8), "w": torch.arange(32.0).view(4, 8)}


def halved(weight: torch.Tensor) -> torch.Tensor:
    return weight / 2


def backend(seed: int | None = None):
    """Its products want half a weight, and double what comes of it; it notes what is prefetched, and what is read."""
    fetched: list[torch.Tensor] = []
    read: list[torch.Tensor] = []

    def linear(x, weight, *, run):
        read.append(weight)
        return (2 * torch.nn.functional.linear(x, weight),)

    def prefetch(weight, after, *, run):
        fetched.append(weight)
        return ()

    made = backends.get("cpu", adversary=seed).with_rules({ops.Linear: linear, ops.Prefetch: prefetch})
    table = evolve(made.table, forms={**made.table.forms, ops.Linear: {"weight": halved}})
    return evolve(made, table=table), fetched, read


def step(*, prefetch: bool = False, twice: bool = False) -> Step:
    """x . w transposed; `twice`: the weight is added to itself too, as it is."""

    def function(x, params):
        if prefetch:
            bind(ops.Prefetch(), params["w"], x)
        (out,) = bind(ops.Linear(), x, params["w"])
        return (out, *bind(ops.Add(), params["w"], params["w"])) if twice else out

    return trace(function, "forms", x=X, params=parameters({"w": WEIGHT}))


def ran(made, described, prepared=None):
    program = schedule(described, orchestrations.serial)
    given = prepared or made.prepare(described, [{"w": VALUES["w"]}])
    return made.compile(program, given)([VALUES["x"]]), given


@pytest.mark.parametrize("seed", [None, 3])
def test_the_numbers_are_those_of_the_weight(seed):
    (out,), _ = ran(backend(seed)[0], step())
    assert torch.equal(out, VALUES["x"] @ VALUES["w"].t())


def test_what_all_want_in_one_form_is_kept_in_it_alone():
    _, prepared = ran(backend()[0], step())
    assert [leaf.tolist() for leaf in prepared.leaves[NAME]] == [(VALUES["w"] / 2).tolist()]
    assert prepared.kept == {NAME: halved}


def test_what_is_wanted_in_two_ways_is_there_in_both():
    (out, doubled), prepared = ran(backend()[0], step(twice=True))
    assert torch.equal(out[0], VALUES["x"] @ VALUES["w"].t()) and torch.equal(doubled[0], 2 * VALUES["w"])
    assert torch.equal(prepared.leaves[NAME][0], VALUES["w"]) and not prepared.kept


def test_what_is_fetched_is_what_is_read():
    made, fetched, read = backend()
    _, prepared = ran(made, step(prefetch=True))
    assert fetched[0] is read[0] is prepared.leaves[NAME][0]


def test_what_is_kept_in_a_form_is_for_whom_it_was_prepared():
    """Another step, or a backend without that form as a hostile machine is: both have to prepare their own."""
    (made, *_), (hostile, *_) = backend(), backend(seed=0)
    prepared = made.prepare(step(), [{"w": VALUES["w"]}])
    message = (
        r"^params\['w'\]: must be prepared by the backend that compiles, for the step that it compiles, which wants it "
        r"as it is: got it kept as halved alone, as its own backend and step want it$"
    )
    for other, described in ((made, step(twice=True)), (hostile, step())):
        with pytest.raises(InputError, match=message):
            ran(other, described, prepared)
    ran(made, step(), prepared)


def test_a_form_may_be_several_tensors():
    """The rule gets them as they are, and their bytes are held, each tensor once."""

    def pieces(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (*(row.clone() for row in weight[:2]), weight[2:].clone(), weight[2:4].clone())

    def linear(x, weight, *, run):
        return (torch.stack([x @ row for row in (*weight[:2], *weight[2])], 1),)

    made = backends.get("cpu").with_rules({ops.Linear: linear})
    made = evolve(made, table=evolve(made.table, forms={**made.table.forms, ops.Linear: {"weight": pieces}}))
    (out,), prepared = ran(made, step())
    assert torch.allclose(out, VALUES["x"] @ VALUES["w"].t())
    assert prepared.kept == {NAME: pieces} and prepared.held(0) == (VALUES["w"].nbytes * 3 // 2, 0)
    other = made.prepare(step(twice=True), [{"w": VALUES["w"]}])
    made.compile(schedule(step(twice=True), orchestrations.serial), other)
    assert other.held(0) == (VALUES["w"].nbytes, VALUES["w"].nbytes * 3 // 2)
