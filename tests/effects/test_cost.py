"""What a program costs on paper is what a run of it does: bytes that move, memory that is alive, order that is kept.

The table of all named orchestrations in `mla_fx/README.md` is what the command there prints; `python -m
tests.effects.test_cost` writes it anew.
"""

import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from attrs import define, evolve, field
from hypothesis import given

from mla_fx import Layout, backends, orchestrations
from mla_fx.backends import Backend, Collective, InProcess
from mla_fx.effects import Aval, Drop, Group, Launch, Program, Record, Wait, cost, schedule
from mla_fx.effects.cost import on_the_wire
from tests.effects import toys
from tests.effects.pages import PAGE, printed, shown, write_anew
from tests.effects.test_check import program
from tests.effects.test_law_teeth import quick, settings
from tests.effects.toys import One, Peek, Two, Update
from tests.setups import Setup

SETUPS = {
    "layer": Setup(),
    "one rank": Setup(ranks=1),
    "four ranks, bf16": Setup(ranks=4, dtype="bf16"),
    "model": Setup(layers=2),
    "context groups": Setup(ranks=Layout(tp=4, dcp=2)),
    "replicas": Setup(ranks=Layout(tp=2, dcp=1, dp=2), layers=2),
    "model of eight ranks": Setup(layers=2, ranks=8, dtype="fp16", tokens=5),
}
each_setup = pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)

# --- bytes on the wire -----------------------------------------------------------


@define
class Counting(InProcess):
    """A world that counts: for every collective, what each rank hands over, and what all together send."""

    handed: list[set[int]] = field(factory=list)
    sent: list[int] = field(factory=list)

    def move(self, how: Any, sent: Sequence[torch.Tensor], *, group: str, spent: bool = False) -> list[torch.Tensor]:
        size = self.layout.group(group).size
        rows = how == "all_to_all_v"
        self.handed.append({one[0].nbytes if rows else one.nbytes for one in sent})
        self.sent.append(sum(sum(between(how, sent[at : at + size])) for at in range(0, len(sent), size)))
        return InProcess.move(self, how, sent, group=group, spent=spent)


def between(how: str, sent: Sequence[torch.Tensor]) -> Iterator[int]:
    """Bytes of every message from one rank to another."""
    ranks = range(len(sent))
    if how == "all_reduce":
        # Two rounds around the ring; in each of their steps a rank passes one chunk on.
        chunks = [chunk.nbytes for chunk in sent[0].flatten().tensor_split(len(sent))]
        for step in 2 * [*ranks[1:]]:
            yield from (chunks[(rank - step) % len(sent)] for rank in ranks)
        return
    for source in ranks:
        for target in ranks:
            if source != target and how == "all_to_all_v":
                rows, counts = sent[source]
                yield counts[target] * rows[:1].nbytes + 8
            elif source != target:
                yield sent[source].nbytes if how == "all_gather" else sent[source][target].nbytes


@each_setup
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_bytes_are_those_that_a_run_moves(setup, name):
    world = Counting(setup.layout)
    backend = evolve(backends.get(name, ranks=setup.layout), world=world)
    described = schedule(setup.step, orchestrations.attention_aside)
    setup.compiled(backend, described)(*backend.put(setup.arguments(), copy=True))
    found = cost(described.with_float(backend.dtype) if backend.dtype else described)
    assert len(found.messages) >= 3
    for message, handed, sent in zip(found.messages, world.handed, world.sent, strict=True):
        if message.launch.op.waits:  # data decide: at most as much
            assert 0 < -(-sent // setup.ranks) <= message.sent, message.launch
        else:
            assert handed == {message.handed}
            assert message.sent == -(-sent // setup.ranks), message.launch
    assert found.sent == 0 if setup.ranks == 1 else found.sent > 0


def test_bytes_where_ranks_do_not_divide():
    """A chunk of three, of two and of two: a rank sends two of them twice, on average 28/3 elements of four bytes."""
    sent = sum(between("all_reduce", [torch.zeros(7)] * 3))
    assert sent == 2 * 2 * 7 * 4 and on_the_wire("all_reduce", 3, 28) == -(-sent // 3) == 38


# --- memory ------------------------------------------------------------------------


class Alive:
    """Wraps the rules of a table: how many bytes of results of rank 0 are alive at the end of each launch."""

    def __init__(self, backend: Backend) -> None:
        self.bytes: dict[int, int] = {}
        self.seen: list[int] = []
        rules = {op: self.wrapped(rule) for op, rule in backend.table.rules.items()}
        self.backend = evolve(backend, table=evolve(backend.table, rules=rules), apart=True)

    def wrapped(self, rule: Any, moved: int = 0) -> Any:
        if isinstance(rule, Collective):
            return Collective(rule.send, self.wrapped(rule.receive, moved=1))  # which may be the result

        def counted(*operands: Any, run: Any, **parameters: Any) -> Any:
            results = rule(*operands, run=run, **parameters)
            if run.rank == 0:
                for result in results:
                    if not any(result is operand for operand in operands[moved:]):
                        self.bytes[id(result)] = result.nbytes
                        weakref.finalize(result, self.bytes.pop, id(result))
                self.seen.append(sum(self.bytes.values()))
            return results

        return counted


@pytest.mark.parametrize("setup", [*SETUPS.values()][:4], ids=[*SETUPS][:4])
@pytest.mark.parametrize("name", ["serial", "exchange-aside", "attention-aside"])
def test_the_peak_is_that_of_a_run(setup, name):
    described = schedule(setup.step, orchestrations.NAMED[name])
    alive = Alive(backends.get("cpu", ranks=setup.ranks))
    run, arguments = setup.compiled(alive.backend, described), setup.arguments()
    for _ in range(2):  # the first run looks at what rules give
        alive.seen.clear()
        run(*arguments)
    memory = cost(described).memory
    assert memory.peak == max(alive.seen) and described.launches[alive.seen.index(memory.peak)] == memory.peak_at
    leaves = torch.utils._pytree.tree_leaves(setup.params()[0])
    assert memory.parameters == sum(leaf.nbytes for leaf in leaves)
    assert memory.states == sum(leaf.nbytes for leaf in torch.utils._pytree.tree_leaves(setup.caches()[0]))
    data = torch.utils._pytree.tree_leaves((setup.hidden()[0], setup.batches()[0]))
    assert memory.data == sum(leaf.nbytes for leaf in data if isinstance(leaf, torch.Tensor))


def test_a_view_and_a_state_take_no_memory():
    effects = (
        Launch("main", One(1), ("x",), ("a",)),
        Launch("main", Peek(3), ("a",), ("view", "made")),
        Launch("main", Update(5), ("view", "made"), ("state",)),
        Drop("made"),
        Launch("main", Two(7), ("state", "x"), ("b",)),
        Drop("view"),
        Launch("main", Two(9), ("b", "x"), ("out",)),
    )
    found = cost(program(*effects)).memory
    assert (found.peak, found.peak_at) == (2 * toys.X.bytes_, effects[1])  # a and made; a and b; b and out
    assert cost(program(*effects[:5], effects[6])).memory.peak == 3 * toys.X.bytes_
    assert found.data == 2 * toys.X.bytes_ and cost(program()).memory.peak_at is None


# --- the longest chain ---------------------------------------------------------------


def before(described: Program) -> set[tuple[int, int]]:
    """Pairs of launches that run in this order in every execution: played, with every choice of the next stream."""
    queues: dict[str, list[tuple[int, Any]]] = defaultdict(list)
    for number, effect in enumerate(described.effects):
        if isinstance(effect, Launch | Record | Wait):
            queues[effect.stream].append((number, effect))
    numbers = [number for number, effect in enumerate(described.effects) if isinstance(effect, Launch)]
    pairs = {(a, b) for a in numbers for b in numbers if a != b}
    start = tuple(0 for _ in queues)
    reached, stack = {start}, [start]
    while stack:
        at = stack.pop()
        done = [entry for queue, upto in zip(queues.values(), at, strict=True) for entry in queue[:upto]]
        ran = {number for number, effect in done if isinstance(effect, Launch)}
        happened = {effect.event for _, effect in done if isinstance(effect, Record)}
        pairs -= {(a, b) for a, b in pairs if b in ran and a not in ran}
        for which, (queue, upto) in enumerate(zip(queues.values(), at, strict=True)):
            if upto < len(queue):
                head = queue[upto][1]
                following = (*at[:which], upto + 1, *at[which + 1 :])
                if following not in reached and not (isinstance(head, Wait) and head.event not in happened):
                    reached.add(following)
                    stack.append(following)
    return pairs


def rows(pairs: set[tuple[int, int]], numbers: Sequence[int]) -> Iterator[list[int]]:
    """Every row of launches that run one after the other."""
    if not numbers:
        yield []
        return
    for row in rows(pairs, numbers[1:]):
        yield row
        row = [numbers[0], *row]
        if all(pair in pairs for pair in pairwise(row)):
            yield row


@settings(quick, max_examples=40)
@given(toys.steps(max_calls=6), toys.orchestrations(max_streams=3))
def test_the_chain_is_the_longest_row_of_launches(step, streams):
    described = schedule(step, streams)
    longest = max(map(len, rows(before(described), toys.launches(described))))
    assert cost(described).chain == longest


def test_chains_by_hand():
    forked = schedule(*_twice("side"))
    assert (cost(forked).chain, cost(forked).launches) == (2, 3)
    assert cost(schedule(*_twice("main"))).chain == 3
    assert cost(program()).chain == 0


def _twice(stream: str) -> Any:
    def both(x: Any) -> Any:
        return toys.bind(Two(5), *toys.bind(One(1), x), *toys.bind(One(3), x))

    return toys.step_of(both), toys.placed({3: stream})


def test_counts_are_those_of_the_effects():
    described = schedule(SETUPS["model"].step, orchestrations.attention_aside, mode="conservative")
    found = cost(described)
    kinds = [type(effect).__name__ for effect in described]
    counted = (found.launches, found.records, found.waits, found.keeps)
    assert counted == tuple(kinds.count(kind) for kind in ("Launch", "Record", "Wait", "Keep"))
    assert min(counted) > 0


def test_a_collective_without_a_group_moves_nothing():
    alone = Program((toys.put("x"),), ("y",), (Launch("main", toys.Exchange(1, Group("dcp", 1)), ("x",), ("y",)),))
    assert [(one.handed, one.sent) for one in cost(alone).messages] == [(Aval((2,), "fp64").bytes_, 0)]


# --- the page ----------------------------------------------------------------------


def test_the_table_on_the_page_is_what_the_command_prints():
    (found,) = shown("--costs").finditer(PAGE.read_text())
    assert printed(found[1]) == found[2], "python -m tests.effects.test_cost writes it anew"
    assert [line.split("`")[1] for line in found[2].splitlines()[2:]] == list(orchestrations.NAMED)


if __name__ == "__main__":
    write_anew("--costs")
