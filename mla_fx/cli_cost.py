"""`mla-fx show --cost` and `--costs`: what a program costs on paper, and all named orchestrations side by side."""

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby

from mla_fx import orchestrations
from mla_fx.effects import Cost, InputError, Program, ScheduleError, cost
from mla_fx.effects.cost import Message
from mla_fx.models.stack import layer_of


def report(program: Program) -> str:
    """The cost of one program, in words and bytes."""
    found = cost(program)
    memory = found.memory
    lines = [
        f"{found.launches} launches, of which {found.chain} run one after the other in every execution",
        f"{found.records} records, {found.waits} waits, {found.keeps} keeps",
        f"each rank sends {found.sent:,} bytes over the wire, and receives as many",
        *(f"  {line}" for line in _wire(found.messages)),
        f"each rank holds parameters of {memory.parameters:,} bytes, states of {memory.states:,}, "
        f"data of a step of {memory.data:,}",
        f"values take at most {memory.peak:,} bytes" + (f", at '{memory.peak_at}'" if memory.peak_at else ""),
        f"planned, each in a place of its own while it lives, they take {memory.planned:,} bytes",
    ]
    return "\n".join(lines)


def _by_layer(messages: Iterable[Message]) -> Mapping[int | None, Mapping[str, int]]:
    """Bytes sent, by layer, None for what is outside of layers, and by the op that sends."""
    found: dict[int | None, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for message in messages:
        found[layer_of(message.launch.tag)][message.launch.op.name] += message.sent
    return found


def _wire(messages: Iterable[Message]) -> Iterator[str]:
    """A line for each layer, and one for layers in a row that send alike; a step without layers has one line."""
    found = _by_layer(messages)
    for sent, alike in groupby(found.items(), lambda item: item[1]):
        names = [layer for layer, _ in alike]
        where = f"layers.{names[0]}" if len(names) == 1 else f"each of layers.{names[0]} to layers.{names[-1]}"
        parts = ", ".join(f"{op} {bytes_:,}" for op, bytes_ in sent.items())
        yield (
            f"{'outside of layers' if names == [None] else where}: {parts}; {sum(sent.values()):,} in all"
            if len(found) > 1
            else parts
        )


_HEAD = (
    *("orchestration", "launches", "longest chain", "records and waits", "keeps"),
    *("bytes sent a rank and layer", "peak of values, bytes a rank"),
)


def table(options: argparse.Namespace, program_of: Callable[[argparse.Namespace], Program]) -> str:
    """The programs that the same options give with each named orchestration, side by side, as a table in Markdown."""
    rows = [_HEAD, ("---",) * len(_HEAD)]
    for name in orchestrations.NAMED:
        try:
            found = tuple(_row(cost(program_of(argparse.Namespace(**{**vars(options), "orchestration": name})))))
        except (InputError, ScheduleError):
            found = ("does not fit the step",)
        rows.append((f"`{name}`", *found))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(found: Cost) -> Iterator[str]:
    sent = {sum(of.values()) for layer, of in _by_layer(found.messages).items() if layer is not None}
    alone = sent or {found.sent}  # a step that is no stack of layers is one
    yield from map(str, (found.launches, found.chain, found.records + found.waits, found.keeps))
    yield " or ".join(f"{bytes_:,}" for bytes_ in sorted(alone))
    yield f"{found.memory.peak:,}"
