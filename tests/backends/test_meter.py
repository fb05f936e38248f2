"""What a meter counts is what a run moves and holds.

Bytes are held against a world that adds up every message by itself, memory against the tensors that results are while
they are alive; in a group of processes each counts its own.
"""

import itertools
from collections import Counter

import pytest
import torch
from attrs import evolve

from mla_fx import backends, orchestrations
from mla_fx.backends.cpu import products
from mla_fx.backends.meter import Metered, Place, Tally
from mla_fx.effects import InputError, cost, ops, schedule
from tests.effects.test_cost import SETUPS, Alive, Counting
from tests.setups import Setup


def run(metered: Metered, setup: Setup, *, times: int = 1):
    """A program of the setup, run so often; the program."""
    described = schedule(setup.step, orchestrations.attention_aside)
    executable = setup.compiled(metered, described)
    arguments = metered.put(setup.arguments(), copy=True)
    for _ in range(times):
        executable(*arguments)
    return described


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_bytes_by_rank_scope_and_collective(setup):
    """Of all ranks together, every message that another world counts; of each of them as many calls as launches."""
    world = Counting(setup.layout)
    metered = Metered.of(evolve(backends.get("cpu", ranks=setup.layout), world=world))
    described = run(metered, setup, times=2)
    launches = [launch for launch in described.launches if launch.op.communicates]
    assert len(world.sent) == 2 * len(launches)
    wanted: Counter[tuple[str, str]] = Counter()
    for launch, sent in zip(itertools.chain(launches, launches), world.sent, strict=True):
        wanted[launch.tag, launch.op.name] += sent
    found: Counter[tuple[str, str]] = Counter()
    for place, tally in metered.meter.moved.items():
        found[place.tag, place.op] += tally.sent
        assert tally.messages == tally.messages_priced
        assert tally.sent == tally.priced or (tally.most and tally.sent < tally.priced)
    slack = 2 * setup.ranks * len(launches)  # of a sum whose elements the ranks do not divide, rounded up for each
    assert wanted.keys() == found.keys()
    assert all(0 <= found[key] - wanted[key] <= slack for key in wanted)
    for rank in range(setup.ranks):
        calls = Counter((launch.tag, launch.op.name, str(launch.op.group_of())) for launch in launches)
        for (tag, op, group), count in calls.items():
            assert metered.meter.moved[Place(rank, tag, op, group)].messages == 2 * count


@pytest.mark.parametrize("setup", [*SETUPS.values()][:4], ids=[*SETUPS][:4])
def test_values_are_those_alive(setup):
    metered = Metered.of(backends.get("cpu", ranks=setup.layout))
    described = run(metered, setup, times=2)
    alive = Alive(backends.get("cpu", ranks=setup.layout))
    setup.compiled(alive.backend, described)(*setup.arguments())
    values = metered.meter.values
    assert values[0] == max(alive.seen) == metered.meter.values_priced == cost(described).memory.peak
    assert [values[rank] for rank in range(setup.ranks)] == [values[0]] * setup.ranks


def test_memory_that_a_result_only_lies_in_is_counted():
    """A rule that gives the beginning of something larger holds all of it."""
    plain = backends.get("cpu", ranks=2)

    def wasteful(x, y, *, run):
        room = torch.empty(2, *x.shape, dtype=x.dtype)
        torch.add(x, y, out=room[0])
        return (room[0],)

    setup = Setup(layers=2)
    metered = Metered.of(plain.with_rules({ops.Add: wasteful}))
    run(metered, setup)
    assert metered.meter.values[0] > metered.meter.values_priced


def test_what_the_formula_does_not_say_is_told():
    tally = Tally(2, 1000, 2, 1000)
    assert str(tally) == "2 messages, 1,000 bytes, as the formula says"
    tally.add(Tally(1, 1, 1, 0))
    assert str(tally) == "3 messages, 1,001 bytes, where the formula says 3 and 1,000"
    assert str(Tally(2, 7, 2, 9, most=True)) == "2 messages, 7 bytes, of at most 9 by the formula"
    assert str(Tally(2, 10, 2, 9, most=True)) == "2 messages, 10 bytes, where the formula says 2 and 9"


def test_results_are_those_of_the_plain_backend():
    setup = Setup(layers=2)
    described = schedule(setup.step, orchestrations.attention_aside)
    plain = backends.get("cpu", ranks=2)
    found, wanted = (
        setup.compiled(each, described)(*each.put(setup.arguments(), copy=True)) for each in (Metered.of(plain), plain)
    )
    for ours, right in zip(*map(torch.utils._pytree.tree_leaves, (found, wanted)), strict=True):
        assert torch.equal(ours, right)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN")
def test_weights_that_a_library_has_packed_are_read(monkeypatch):
    """As 16-bit ones are on a processor that multiplies 16 bits: they have no memory that can be looked at."""
    monkeypatch.setattr(products, "compiled", lambda dtype: False)
    monkeypatch.setattr(products, "packs", lambda dtype: True)
    test_results_are_those_of_the_plain_backend()


def test_a_hostile_machine_is_refused():
    with pytest.raises(InputError, match="adversary: a hostile machine cannot be metered: got seed 3"):
        Metered.of(backends.get("cpu", ranks=2, adversary=3))


def test_nothing_is_captured():
    metered, setup = Metered.of(backends.get("cpu", ranks=2)), Setup()
    program = schedule(setup.step, orchestrations.serial)
    with pytest.raises(InputError, match="capture: a metered program runs launch by launch: got True"):
        metered.compile(program, metered.prepare(program, setup.params()), capture=True)


def test_parameters_that_are_one_tensor_are_held_once():
    """And what is made of them for an operator is told beside."""
    setup = Setup(layers=2, ranks=2)
    plain = backends.get("cpu", ranks=2)
    params = setup.params()
    params[0] = params[0]._replace(lm_head=params[0].embed_tokens)
    prepared = plain.prepare(setup.step, params)
    sizes = [sum(leaf.nbytes for leaf in torch.utils._pytree.tree_leaves(each)) for each in params]
    assert prepared.held(1) == (sizes[1], 0)
    assert prepared.held(0) == (sizes[0] - params[0].lm_head.nbytes, 0)
    put = next(put for put in prepared.inputs.values() if len(put.aval.shape) == 2)
    prepared.of(put, torch.Tensor.detach)  # in the same memory
    assert prepared.held(1) == (sizes[1], 0)
    prepared.of(put, torch.clone)
    assert prepared.held(1) == (sizes[1], put.aval.bytes_)
    half = backends.get("reference", ranks=2).prepare(setup.step, params)  # which is moved, to another dtype
    assert half.held(0)[0] == 2 * prepared.held(0)[0]
