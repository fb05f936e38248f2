"""`mla-fx show --growth`: how work, bytes and memory of a rank grow with the ranks and with the history."""

import math
from collections.abc import Iterator
from typing import Final

from attrs import evolve, field, frozen

from mla_fx import Layout, MlaConfig, Sharding, StepShape, attention_step
from mla_fx.effects import Orchestration, Program, cost, schedule
from mla_fx.effects.cost import multiply_adds

#: Tokens of history, and ranks, of the rows of the table.
ROWS: Final = (
    *((ranks, 2**power) for ranks in (1, 2, 4, 8) for power in (10, 14, 17)),
    *((ranks, 2**power) for ranks in (1, 8) for power in (20,)),
    *((ranks, 2**power) for ranks in (16, 64, 256) for power in (17, 20)),
)
_HEAD: Final = (
    *("ranks", "history", "multiply-adds", "of them history", "bytes sent"),
    *("weights, bytes", "cache, bytes", "peak of values, bytes"),
)


@frozen
class Point:
    """One layer's attention on a rank of many: `shape.requests` requests with a new token each and as long a history.

    Ranks that do not divide the heads are replicas of those that do, each with requests of its own.  `work` and
    `cache` are those of the rank that holds most of the history, `of_history` the work that grows with it.
    """

    config: MlaConfig
    shape: StepShape
    history: int
    orchestration: Orchestration
    program: Program = field(init=False)

    def __attrs_post_init__(self) -> None:
        made = schedule(attention_step(self.config, self.shape), self.orchestration)
        object.__setattr__(self, "program", made)

    @classmethod
    def of(cls, config: MlaConfig, shape: StepShape, ranks: int, history: int, orchestration: Orchestration) -> "Point":
        """With sizes in which `ranks` ranks have room for the history and the new token."""
        tp = math.gcd(ranks, config.num_attention_heads)
        layout = Layout(tp=tp, dp=ranks // tp)
        width = Sharding(ranks=layout.dcp, block_size=shape.block_size).blocks(history + 1)
        blocks = shape.requests * width
        sizes = evolve(shape, ranks=layout, tokens=shape.requests, blocks=blocks, table_width=width)
        return cls(config, sizes, history, orchestration)

    def work(self, history: int | None = None) -> int:
        """Multiply-adds with so much history on the rank, by default its share."""
        count, sharding = self.shape.requests, Sharding(ranks=self.shape.dcp.size, block_size=self.shape.block_size)
        share = max(sharding.local_lengths(self.history)) if history is None else history
        lengths = {"batch.query_lengths": (1,) * count, "batch.history_lengths": (share,) * count}
        return multiply_adds(self.program.inputs, self.program.launches, lengths)

    def row(self) -> Iterator[str]:
        """The cells of the table."""
        found = cost(self.program)
        memory = found.memory
        yield str(self.shape.layout.size)
        yield f"{self.history // 1024}k" if self.history < 2**20 else f"{self.history >> 20}M"
        sizes = (self.work(), self.work() - self.work(0), found.sent, memory.parameters, memory.states, memory.peak)
        yield from (f"{size:,}" for size in sizes)


def growth(config: MlaConfig, shape: StepShape, orchestration: Orchestration) -> str:
    """A table in Markdown."""
    points = (Point.of(config, shape, ranks, history, orchestration) for ranks, history in ROWS)
    rows = [_HEAD, ("---",) * len(_HEAD), *(tuple(point.row()) for point in points)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
