"""A plan of memory: what lives at once lies apart, in every execution; and how much more than the peak it takes."""

from collections import defaultdict
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_fx import StepShape, attention_step, orchestrations
from mla_fx.effects import Drop, Keep, Launch, Program, cost, plan, schedule
from mla_fx.effects.memory import ALIGNED, Block
from mla_fx.models import deepseek_v3_config, model_step
from tests.effects import toys
from tests.effects.test_cost import SETUPS, before
from tests.effects.test_law_teeth import quick, settings


def lives(program: Program) -> dict[str, tuple[int, int]]:
    """From which launch to which drop memory is used, by effect: walked with the set of what is alive."""
    alias: dict[str, str] = {}
    alive: dict[str, int] = {}
    found: dict[str, tuple[int, int]] = {}
    for number, effect in enumerate(program.effects):
        if isinstance(effect, Launch):
            inside = {effect.results[r]: effect.operands[p] for p, r in effect.op.written().items()}
            inside |= {effect.results[r]: effect.operands[p] for r, p in effect.op.viewed().items()}
            for name in effect.results:
                alias[name] = alias.get(inside[name], inside[name]) if name in inside else name
                if name not in inside:
                    alive[name] = number
        if isinstance(effect, Drop) and (memory := alias.get(effect.value)) in alive:
            found[memory] = (alive.pop(memory), number)
    return found | {name: (born, len(program.effects)) for name, born in alive.items()}


def bytes_of(program: Program, name: str) -> int:
    """Elements, times the bits that the dtype's name says."""
    aval = program.avals()[name]
    return torch.Size(aval.shape).numel() * int(aval.dtype.lstrip("abfinpt")) // 8


def overlapping(program: Program) -> list[tuple[str, str]]:
    """Pairs of values that have bytes in common."""
    spans = {name: (p.stream, p.start, p.start + p.bytes_) for name, p in plan(program).places.items()}
    return [
        (one, other)
        for one, other in combinations(spans, 2)
        if spans[one][0] == spans[other][0] and spans[one][1] < spans[other][2] and spans[other][1] < spans[one][2]
    ]


def holds(program: Program) -> None:
    """All values have a place of their size, apart from what lives at the same time; blocks end where they do."""
    living, found = lives(program), plan(program)
    assert living.keys() == found.places.keys()
    ends: dict[str, int] = defaultdict(int)
    for name, place in found.places.items():
        assert place.bytes_ == bytes_of(program, name) and place.start % ALIGNED == 0
        ends[place.stream] = max(ends[place.stream], place.start + place.bytes_)
    assert {stream: -(-end // ALIGNED) * ALIGNED for stream, end in ends.items()} == dict(found.blocks)
    for one, other in overlapping(program):
        (first, gone), (second, _) = sorted((living[one], living[other]))
        assert gone < second, (one, other, first)
    memory = cost(program).memory
    sums = [sum(bytes_of(program, name) for name, (b, e) in living.items() if b <= at < e) for at, _ in living.values()]
    most = max(sums, default=0)
    assert memory.peak == most <= memory.planned == found.bytes_


@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize("orchestration", ["serial", "attention-aside"])
def test_what_lives_at_once_lies_apart(name, orchestration):
    holds(schedule(SETUPS[name].step, orchestrations.NAMED[orchestration]))


@settings(quick, max_examples=40)
@given(toys.steps(max_calls=7), toys.orchestrations(max_streams=3), st.sampled_from(["minimal", "conservative"]))
def test_in_every_execution(step, streams, mode):
    """Whoever uses the one runs before what allocates the other, whatever order the streams take."""
    program = schedule(step, streams, mode=mode)
    holds(program)
    pairs, living, root = before(program), lives(program), program.memory()
    uses = {
        memory: [
            number
            for number, effect in enumerate(program.effects)
            if isinstance(effect, Launch) and memory in {root[one] for one in (*effect.operands, *effect.results)}
        ]
        for memory in living
    }
    for one, other in overlapping(program):
        (_, first), (born, second) = sorted(((living[one][0], one), (living[other][0], other)))
        assert all((use, born) in pairs for use in uses[first]), (first, second)


def test_what_is_kept_goes_to_nobody():
    """A drop does not say when the other stream is done with it."""
    one, two = toys.One(1), toys.One(3)
    effects = (Launch("main", one, ("x",), ("a",)), Drop("a"), Launch("main", two, ("x",), ("b",)))
    free = Program((toys.put("x"),), ("b",), effects)
    held = Program((toys.put("x"),), ("b",), (effects[0], Keep("a", "side"), *effects[1:]))
    assert plan(free).blocks == {"main": ALIGNED} and plan(held).blocks == {"main": 2 * ALIGNED}


def test_a_stack_of_layers_takes_no_more_than_one():
    """What is planned is at most a quarter more than the peak, for 61 layers as for two."""
    shape = StepShape(ranks=8, tokens=4, requests=4)
    config = deepseek_v3_config()
    for step in (attention_step(config.attention, shape), model_step(config, shape)):
        memory = cost(schedule(step, orchestrations.attention_aside)).memory
        assert memory.peak <= memory.planned <= 1.25 * memory.peak


@settings(quick)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 700), st.randoms(use_true_random=False)), max_size=40))
def test_a_block_of_any_sizes(asked):
    """Bytes that are taken are nobody else's, and what is given back is whole again: held against a set of bytes."""
    block, taken = Block(), {}
    for number, (give, size, random) in enumerate(asked):
        if give and taken:
            start, size = taken.pop(random.choice([*taken]))
            block.give(start, size)
        else:
            start = block.take(size)
            used = {byte for at, count in taken.values() for byte in range(at, at + count)}
            assert not used.intersection(range(start, start + size))
            gap = any(used.isdisjoint(range(at, at + size)) for at in range(0, block.end - size + 1, ALIGNED))
            assert start + size <= block.end and gap
            taken[number] = (start, size)
    for start, size in taken.values():
        block.give(start, size)
    assert block.gaps == ([(0, block.end)] if block.end else [])
