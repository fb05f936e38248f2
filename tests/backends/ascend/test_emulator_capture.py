"""Graphs on the emulated device, by the wheel's own `torch.npu.NPUGraph`: what is captured, replayed and updated."""

import json
import random
from typing import Any

import pytest
import torch

from mla_fx.backends.ascend.emulator import Machine
from tests.backends.ascend import ranks as do
from tests.backends.ascend.graphs import inner, issued

pytestmark = pytest.mark.usefixtures("emulator")


def test_nothing_runs_before_a_replay_and_a_replay_is_one_call(emulator):
    graph, x = torch.npu.NPUGraph(), torch.ones(4, device="npu")
    with emulator.tracing() as trace:
        with torch.npu.graph(graph):
            y = (x + 1) * 3
        assert y.isnan().all()
    assert not inner(trace) and "aclnnAdds" not in [task.name for task in trace]
    x.fill_(4)
    with emulator.tracing() as trace:
        graph.replay()
    assert issued(trace) == ["replay"] and inner(trace) == ["aclnnAdds", "aclnnMuls"]
    assert y.tolist() == [15.0] * 4
    with emulator.tracing() as trace:
        for value in (0, 1):
            x.fill_(value)
            graph.replay()
    assert issued(trace) == ["operator", "replay"] * 2 and inner(trace) == ["aclnnAdds", "aclnnMuls"] * 2
    assert y.tolist() == [6.0] * 4


class Recipe:
    """Random operators on up to three streams, with an event wherever a stream reads or overwrites what another made.

    On the CPU it is the definition of itself: one operator after the other.
    """

    def __init__(self, seed: int, *, length: int = 14, streams: int = 3) -> None:
        draw = random.Random(seed)
        self.streams, self.slots = streams, 4
        self.steps = [
            (draw.randrange(streams), draw.choice("+*@c"), *draw.choices(range(self.slots), k=3)) for _ in range(length)
        ]

    def inputs(self, number: int) -> list[torch.Tensor]:
        made = torch.Generator().manual_seed(number)
        return [torch.rand(8, 8, generator=made) for _ in range(self.slots)]

    @staticmethod
    def step(name: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        if name == "c":
            out.copy_(a)
        else:
            out.copy_({"+": torch.add, "*": torch.mul, "@": torch.matmul}[name](a, b) * 0.5)

    def run(self, slots: list[torch.Tensor]) -> None:
        for _, name, a, b, out in self.steps:
            self.step(name, slots[a], slots[b], slots[out])

    def issue(self, slots: list[torch.Tensor], side: list[Any], *, forgets: int | None = None) -> None:
        """On the current stream and the side streams, which start behind it and are joined at the end.

        The step that `forgets` waits for nothing.
        """
        main = torch.npu.current_stream()
        streams = [main, *side[: self.streams - 1]]
        start = main.record_event()
        for stream in streams[1:]:
            stream.wait_event(start)
        touched: list[dict[int, Any]] = [{} for _ in slots]
        for number, (where, name, a, b, out) in enumerate(self.steps):
            with torch.npu.stream(streams[where]):
                for slot in () if number == forgets else (a, b, out):
                    for other, event in touched[slot].items():
                        if other != where:
                            streams[where].wait_event(event)
                self.step(name, slots[a], slots[b], slots[out])
                done = streams[where].record_event()
                for slot in {a, b, out}:
                    touched[slot][where] = done
        for stream in streams[1:]:
            main.wait_event(stream.record_event())


def replays_right(graph: Any, recipe: Recipe, slots: list[torch.Tensor], seed: int) -> bool:
    """Whether a replay with the inputs of a seed gives what the recipe gives on the CPU."""
    given = recipe.inputs(seed)
    for slot, value in zip(slots, given, strict=True):
        slot.copy_(value)
    graph.replay()
    found = [slot.cpu() for slot in slots]
    recipe.run(given)
    return all(map(torch.equal, found, given))


@pytest.mark.parametrize("number", range(4))
def test_captured_is_eager_bit_for_bit(emulator: Machine, number):
    """Against the recipe on the CPU, under seeds of all kinds, replayed with other inputs each time."""
    recipe, side = Recipe(number), [torch.npu.Stream() for _ in range(2)]
    slots = [torch.zeros(8, 8, device="npu") for _ in range(recipe.slots)]
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        recipe.issue(slots, side)
    for seed in range(12):
        emulator.seed(seed)
        assert replays_right(graph, recipe, slots, seed), seed


def test_a_step_that_waits_for_nothing_is_wrong_under_some_seed(emulator: Machine):
    recipe, side, wrong = Recipe(5), [torch.npu.Stream() for _ in range(2)], 0
    slots = [torch.zeros(8, 8, device="npu") for _ in range(recipe.slots)]
    for forgets in range(len(recipe.steps)):
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            recipe.issue(slots, side, forgets=forgets)
        for seed in range(24):
            emulator.seed(seed)
            if not replays_right(graph, recipe, slots, seed):
                wrong += 1
                break
    assert wrong >= 3  # others have nothing to wait for, or another one waits for it too


def test_a_replay_has_its_place_on_its_stream_and_on_no_other(emulator):
    """Behind what was issued before it, in front of what comes after; another stream has to wait for an event."""
    x, y, side = torch.zeros(4, device="npu"), torch.zeros(4, device="npu"), torch.npu.Stream()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        for _ in range(3):
            x += 1
    for waits in (True, False):
        found = set()
        for seed in range(24):
            emulator.seed(seed)
            x.fill_(10)
            graph.replay()
            if waits:
                side.wait_stream(torch.npu.current_stream())
            with torch.npu.stream(side):
                y.copy_(x)
            torch.npu.synchronize()
            found.add(y[0].item())
            x.mul_(2)
            assert x.tolist() == [26.0] * 4
        assert found == {13.0} if waits else len(found) > 2


def test_replays_of_one_graph_follow_each_other(emulator):
    """From whatever streams: the second begins when the first is over."""
    x, graph, side = torch.zeros(4, device="npu"), torch.npu.NPUGraph(), torch.npu.Stream()
    with torch.npu.graph(graph):
        y = x + 1
        x.copy_(y)
    for seed in range(16):
        emulator.seed(seed)
        x.zero_()
        torch.npu.synchronize()
        for stream in (torch.npu.current_stream(), side):
            with torch.npu.stream(stream):
                graph.replay()
        torch.npu.synchronize()
        assert x.tolist() == [2.0] * 4


def test_a_seed_replays_what_happened(emulator):
    recipe, side = Recipe(1), [torch.npu.Stream() for _ in range(2)]
    slots, graph, runs = [torch.zeros(8, 8, device="npu") for _ in range(recipe.slots)], torch.npu.NPUGraph(), []
    with torch.npu.graph(graph):
        recipe.issue(slots, side)
    for seed in (5, 6, 5):
        emulator.seed(seed)
        with emulator.tracing() as trace:
            graph.replay()
        runs.append([(task.kind, task.name, task.stream) for task in trace])
    assert runs[0] == runs[2] != runs[1]
    assert {task.graph for task in trace} - {0} and {task.stream for task in trace if task.graph} >= {
        side[0].npu_stream
    }


def test_a_fault_in_a_replay_leaves_graphs_usable(emulator):
    x, graph = torch.ones(4, device="npu"), torch.npu.NPUGraph()
    failing = [True]

    @emulator.operator("aclnnTan", "T O")
    def tan(value, out):
        assert not failing[0], "it was told to fail"
        out.copy_(value.tan())

    with torch.npu.graph(graph):
        y = x.tan() + 1
    graph.replay()
    with pytest.raises(RuntimeError, match="it was told to fail"):
        torch.npu.synchronize()
    emulator.recover()
    failing.clear()
    failing.append(False)
    graph.replay()
    assert torch.equal(y.cpu(), torch.ones(4).tan() + 1)


def test_graphed_callables(emulator):
    """Forward and backward, each a graph, in one pool: as the same function without."""
    function = torch.npu.make_graphed_callables(lambda x, w: (x @ w).exp(), tuple(_pair(emulator)))
    for seed in range(3):
        emulator.seed(seed)
        x, w = _pair(emulator, seed)
        again = [t.detach().cpu().requires_grad_() for t in (x, w)]
        function(x, w).sum().backward()
        (again[0] @ again[1]).exp().sum().backward()
        for found, wanted in zip((x, w), again, strict=True):
            torch.testing.assert_close(found.grad.cpu(), wanted.grad)


def _pair(emulator, seed=0):
    made = torch.Generator().manual_seed(seed)
    return [torch.rand(4, 4, generator=made).npu().requires_grad_() for _ in range(2)]


def test_a_dump_has_the_tasks_of_each_stream(emulator, tmp_path):
    """As a trace, which the wheel reads to make an aligned one."""
    graph, side, x = torch.npu.NPUGraph(), torch.npu.Stream(), torch.ones(4, device="npu")
    with torch.npu.graph(graph):
        main = torch.npu.current_stream()
        side.wait_stream(main)
        with torch.npu.stream(side):
            x + 1
        main.wait_stream(side)
    graph.debug_dump(str(tmp_path / "graph.json"))
    by_stream: dict[str, list[str]] = {}
    for task in json.loads((tmp_path / "graph.json").read_text()):
        by_stream.setdefault(task["tid"], []).append(task["name"])
    assert list(by_stream.values()) == [["EVENT_RECORD", "EVENT_WAIT"], ["EVENT_WAIT", "KERNEL", "EVENT_RECORD"]]
    assert [path.name for path in tmp_path.glob("*aligned*")]


@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives_are_replayed(processes, ranks):
    """Sums and exchanges over processes, under other seeds in each; eager collectives keep their turn between them."""
    for rank, (found, ran) in enumerate(processes.run(do.replayed, ranks=ranks, seeds=4)):
        for seed, (got, names) in enumerate(zip(found, ran, strict=True)):
            total = sum(10.0 * seed + other for other in range(ranks))
            assert got == [2 * total + 10.0 * seed + other + 1 for other in range(ranks)] + [ranks], rank
            assert names == ["all_reduce", "all_to_all"]


def test_all_ranks_replay_the_same(processes):
    for said in processes.run(do.unequal_replays, ranks=2):
        assert "must be the same on all ranks: rank 0 is in all_reduce" in said
