"""Graphs on the emulated device, by the wheel's own `torch.npu.NPUGraph`: what is captured, replayed and updated."""

import random
from typing import Any

import pytest
import torch

from mla_fx.backends.ascend.emulator import Machine
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
        """On the current stream and the side streams, which start behind it and are joined at the end."""
        main = torch.npu.current_stream()
        streams = [main, *side[: self.streams - 1]]
        start = main.record_event()
        for stream in streams[1:]:
            stream.wait_event(start)
        touched: list[dict[int, Any]] = [{} for _ in slots]
        crossings = 0
        for where, name, a, b, out in self.steps:
            with torch.npu.stream(streams[where]):
                for slot in (a, b, out):
                    for other, event in touched[slot].items():
                        if other != where:
                            if crossings != forgets:
                                streams[where].wait_event(event)
                            crossings += 1
                self.step(name, slots[a], slots[b], slots[out])
                done = streams[where].record_event()
                for slot in {a, b, out}:
                    touched[slot][where] = done
        for stream in streams[1:]:
            main.wait_event(stream.record_event())


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
        given = recipe.inputs(seed)
        for slot, value in zip(slots, given, strict=True):
            slot.copy_(value)
        graph.replay()
        found = [slot.cpu() for slot in slots]
        recipe.run(given)
        assert all(map(torch.equal, found, given)), seed
