"""A judge of small programs: every interleaving is played, and what can go wrong is seen to go wrong.

It shares no code with the law, the scheduler or the hostile machine, and knows
no clocks.  A program is read as what a device is given: queues with events, a
host that issues in order, an allocator.  From every state that can be reached,
every move is made; `verdict` says what the worst of them did.  Two ranks are
needed for collectives alone, and these are judged by the orders in which one
rank can run them: two ranks with different ones wait for each other.

    A launch begins and ends in two moves.  It reads while it runs, and holds its workspaces.
    Its results are memory that it owns from its beginning on; what it writes in place is torn while it runs.
    Dropped memory goes to any later launch on its home stream; kept memory once each keeping stream has
    done what it had been given at the drop, and that is known when the launch is issued.
    Inputs are there when the main stream begins, or when they are staged; outputs are read at its end.
"""

from collections.abc import Iterator
from typing import Any, Final

from mla_fx.effects import Drop, Keep, Launch, Program, Record, Stage, Wait

MAIN: Final = "main"
BEGIN, END, READ, PASS, HOLD, SEND, SEEN = "begin", "end", "read", "pass", "hold", "send", "seen"
Move = tuple[Any, ...]


class Judge:
    """Plays one program.  A state is what is done on each stream, what the host has issued, and what it handed out."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.effects = program.effects
        self.wrong: set[str] = set()
        self.orders: dict[str, set[tuple[int, ...]]] = {}  # in which a rank's collectives began, by what goes on alone
        self.block: dict[str, str] = {one.name: one.name for one in program.inputs}
        self.version: dict[str, int] = dict.fromkeys(self.block, 0)  # of its block
        self.home: dict[str, str] = {}
        for launch in program.launches:
            self._results(launch)

    def _results(self, launch: Launch) -> None:
        names, results = list(launch.op.operands), list(launch.op.results)
        written = {results.index(r): launch.operands[names.index(o)] for o, r in launch.op.writes.items()}
        for k, name in enumerate(launch.results):
            if results[k] in launch.op.views:
                # Another name for what is there: it has nobody's memory, and nothing of its own is ever written to it.
                seen = launch.operands[names.index(launch.op.views[results[k]])]
                self.block[name], self.version[name] = self.block[seen], self.version[seen]
                continue
            old = written.get(k)
            self.block[name] = name if old is None else self.block[old]
            self.version[name] = 0 if old is None else self.version[old] + 1
            if old is None:
                self.home[name] = launch.stream

    def verdict(self) -> set[str]:
        """What can go wrong: "race", "collectives", "unjoined"; nothing for a program that is right."""
        self.wrong, self.orders = set(), {}
        start = (0, ((MAIN, ((SEEN, None),)),), frozenset(), frozenset(), (), frozenset(), (), ())
        seen, stack = {start}, [start]
        while stack and "race" not in self.wrong:
            state = stack.pop()
            for following in self._moves(state):
                if following not in seen:
                    seen.add(following)
                    stack.append(following)
        if any(len(orders) > 1 for orders in self.orders.values()):
            self.wrong.add("collectives")
        return self.wrong

    # A state: next effect; (stream, queue)s; events passed; running launches; contents of blocks, as pairs of a block
    # and (version, owner) or None where it is torn; marks of keeping streams passed; dropped blocks with the marks
    # they wait for; collectives begun so far.

    def _moves(self, state: Any) -> Iterator[Any]:
        position, queues = state[0], dict(state[1])
        # Two kinds of moves are made at once, since earlier only lets more happen: an event that can pass, and the
        # host's, but for a launch that could take kept memory later and cannot yet.
        if position <= len(self.effects) and not self._waits_for_memory(state):
            yield self._issue(state)
            return
        for stream, queue in queues.items():
            if queue and queue[0][0] == PASS:
                yield self._act(state, stream, queue)
                return
        if position <= len(self.effects):
            yield self._issue(state)
        for stream, queue in queues.items():
            if queue:
                after = self._act(state, stream, queue)
                if after is not None:
                    yield after
        if position > len(self.effects) and not any(queues.values()):
            self._ran(state[7])

    def _ran(self, order: tuple[int, ...]) -> None:
        """One order of collectives to the end.  Ranks with two wait for each other, unless both groups go on alone."""
        queues: dict[str, list[int]] = {}
        for at in order:
            group = self.effects[at].op.group
            queues.setdefault(group.name if group.independent else "", []).append(at)
        for queue, mine in queues.items():
            self.orders.setdefault(queue, set()).add(tuple(mine))

    def _waits_for_memory(self, state: Any) -> bool:
        """Whether the next launch would take memory if it were issued later."""
        effect = self.effects[state[0]] if state[0] < len(self.effects) else None
        if not isinstance(effect, Launch):
            return False
        return any(home == effect.stream and not set(waits) <= state[5] for _, home, waits in state[6])

    def _issue(self, state: Any) -> Any:
        position, queues, events, running, memory, marks, free, order = state
        table = dict(queues)

        def put(stream: str, *moves: Move) -> None:
            table[stream] = (*table.get(stream, ()), *moves)

        if position == len(self.effects):
            put(MAIN, (READ, position))
            return (position + 1, tuple(sorted(table.items())), events, running, memory, marks, free, order)
        match effect := self.effects[position]:
            case Launch():
                mine = [one for one in free if one[1] == effect.stream and set(one[2]) <= marks]
                free = tuple(one for one in free if one not in mine)
                put(effect.stream, (BEGIN, position, tuple(one[0] for one in mine)), (END, position))
            case Stage():
                put(MAIN, (SEND, position))
            case Record():
                put(effect.stream, (PASS, effect.event))
            case Wait():
                put(effect.stream, (HOLD, effect.event))
            case Drop():
                block, waits = self.block[effect.value], []
                for stream in self._keeping(position, block):
                    waits.append((position, stream))
                    put(stream, (SEEN, (position, stream)))
                free = (*free, (block, self.home[block], tuple(waits)))
            case Keep():
                pass
        return (position + 1, tuple(sorted(table.items())), events, running, memory, marks, free, order)

    def _keeping(self, drop: int, block: str) -> list[str]:
        kept = [e for e in self.effects[:drop] if isinstance(e, Keep)]
        return list(dict.fromkeys(keep.stream for keep in kept if self.block[keep.value] == block))

    def _act(self, state: Any, stream: str, queue: tuple[Move, ...]) -> Any:
        """The head of a queue is done, where it may be."""
        position, queues, events, running, memory, marks, free, order = state
        head, content = queue[0], dict(memory)
        match head:
            case ("hold", event):
                if event not in events:
                    return None
            case ("pass", event):
                events = events | {event}
            case ("seen", None):
                content.update({one.name: 0 for one in self.program.inputs if one.place != "staged"})
            case ("seen", mark):
                marks = marks | {mark}
            case ("send", at):
                content.update(dict.fromkeys(self.effects[at].values, 0))
            case ("begin", at, ruined):
                order = self._begin(at, ruined, running, content, order)
                running = running | {at}
            case ("end", at):
                self._end(at, content)
                running = running - {at}
            case ("read", _):
                self._read(queues, running, content)
        rest = tuple(sorted({**dict(queues), stream: queue[1:]}.items()))
        return (position, rest, events, running, tuple(sorted(content.items())), marks, free, order)

    def _begin(self, at: int, ruined: Any, running: Any, content: dict[str, Any], order: Any) -> Any:
        launch = self.effects[at]
        others = [self.effects[k] for k in running]
        if any(set(launch.op.uses) & set(other.op.uses) for other in others):
            self.wrong.add("race")
        for block in ruined:
            # Whoever still runs on this memory, or will, has lost it: its content is nobody's version.
            content[block] = -1
            if any(self.block[name] == block for other in others for name in (*other.operands, *other.results)):
                self.wrong.add("race")
        written = {self.block[name] for name in self._written(launch)}
        for name in launch.operands:
            self._reads(name, content)
        for other in others:
            theirs = {self.block[name] for name in self._written(other)}
            if written & {self.block[n] for n in other.operands} or theirs & {self.block[n] for n in launch.operands}:
                self.wrong.add("race")
        return (*order, at) if launch.op.communicates else order

    def _written(self, launch: Launch) -> list[str]:
        names = list(launch.op.operands)
        return [launch.operands[names.index(one)] for one in launch.op.writes]

    def _reads(self, name: str, content: dict[str, Any]) -> None:
        if content.get(self.block[name]) != self.version[name]:
            self.wrong.add("race")

    def _end(self, at: int, content: dict[str, Any]) -> None:
        launch = self.effects[at]
        for name in launch.operands:
            self._reads(name, content)
        for result, name in zip(launch.op.results, launch.results, strict=True):
            if result not in launch.op.views:
                content[self.block[name]] = self.version[name]

    def _read(self, queues: Any, running: Any, content: dict[str, Any]) -> None:
        for name in self.program.outputs:
            self._reads(name, content)
        # The next program's launches follow the end of main alone: what still runs is in their way.
        if running or any(
            move[0] in (BEGIN, END, HOLD) for stream, queue in queues if stream != MAIN for move in queue
        ):
            self.wrong.add("unjoined")
