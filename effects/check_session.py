"""The law of a session, checked with vector clocks of actions.

Every program of a session is held to the law of a program, 1 to 6.  Between
programs, states, workspaces and collectives are ordered by rules 2 and 6 as
they are within one, and

    7  what a captured program reads or writes at replay is not given to anybody else while it can be
       replayed or its outputs can still be read
    8  a shared pool is sound for the replays that the session allows: one at a time, in any order, each
       complete before the next starts, and outputs read before a sharer that may lie in them is replayed
    9  every updatable launch is updated exactly once before each replay, behind the replay before it
   10  a workspace or a staging buffer has its size when the first capture that uses it begins
   11  nothing that waits for the host stands between a capture's begin and its end, and every stream has
       joined by then; staged copies are outside: a fill makes them

Which memory may be one.  A value of a capture has one address.  What is free in
its pool when the capture begins may be given to it: of the captures and runs
before, what they let go of on the same stream, which is all but their outputs.
So passing values of two captures may always be one memory, and an output may
lie where a program has passing values that was captured before, never one that
was captured later.  Whether they are is luck, and the law knows no sizes: what
may be is refused.  Memory that is let go of in no pool is anybody's at any time.

Nothing is shared with who makes sessions, and nothing with the law of a program
but `violations` and their words.  `order` of a violation is True where some
execution goes wrong, for want of an order, an update or memory; False where the
session is malformed.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from attrs import define, evolve, field

from mla_fx.effects.check import LawError, Violation, violations
from mla_fx.effects.program import MAIN, Drop, Record, Wait
from mla_fx.effects.session import (
    Action,
    Capture,
    Fill,
    Member,
    Read,
    Release,
    Replay,
    Reserve,
    Run,
    Session,
    Taken,
    Update,
)
from mla_fx.effects.session_memory import Buffer, Captured, Content, Facts, Life, Place, Use, facts_of, see


def check_session(session: Session) -> None:
    """Raise `LawError` unless the session is legal."""
    if found := session_violations(session):
        raise LawError(found)


def session_violations(session: Session) -> tuple[Violation, ...]:
    """Every breach of the law by the session and its programs; empty for a legal one."""
    checker = _Checker(session)
    checker.walk()
    return tuple(checker.found)


@define(eq=False)
class _Checker:
    session: Session
    found: list[Violation] = field(factory=list)
    members: dict[str, Member] = field(factory=dict)
    facts: dict[str, Facts] = field(factory=dict)
    state: dict[str, str] = field(factory=dict)  # "member.input" -> the memory that it is, where it is shared
    clocks: dict[str, dict[str, int]] = field(factory=dict)
    events: dict[str, tuple[Record, Mapping[str, int]]] = field(factory=dict)
    waited: set[str] = field(factory=set)
    uses: dict[str, list[Use]] = field(factory=lambda: defaultdict(list))  # by stream, in order
    captures: dict[str, Captured] = field(factory=dict)
    released: dict[str, Use] = field(factory=dict)
    lives: dict[str, Life] = field(factory=dict)  # member -> its newest
    buffers: dict[str, Buffer] = field(factory=lambda: defaultdict(Buffer))
    contents: dict[str, Content] = field(factory=dict)  # of "member.output"
    filled: dict[str, tuple[str, Use]] = field(factory=dict)  # buffer of static inputs -> for whom, by its last fill
    dropped: dict[str, Use] = field(factory=dict)  # "member.output", or a buffer of static inputs
    number: int = -1

    def walk(self) -> None:
        for member in self.session.members:
            if member.name in self.members or not member.name.isidentifier():
                self.form(f"members: each must have an identifier of its own as name: got {member.name!r}")
            self.members[member.name] = member
        for names in self.session.shared:
            self.one_memory(names)
        captured = {action.member for action in self.session.actions if isinstance(action, Capture)}
        for member in self.members.values():
            self.facts[member.name] = facts_of(member, self.state)
            self.program(member, captured=member.name in captured)
        for number, action in enumerate(self.session.actions):
            self.number = number
            if why := self.malformed(action):
                self.form(f"'{action}' {why}", action)
            else:
                self.act(action)
        for event, (record, _) in self.events.items():
            if event not in self.waited:
                self.found.append(Violation(4, f"event {event} is recorded and nobody waits for it", record))

    def form(self, message: str, first: Action | None = None) -> None:
        self.found.append(Violation(0, message, first))

    def wrong(self, rule: int, message: str, first: Use | None, second: Use) -> None:
        """A breach by which an execution goes wrong."""
        self.found.append(Violation(rule, message, first.action if first else None, second.action, order=True))

    # --- form, and programs by themselves --------------------------------------

    def one_memory(self, names: tuple[str, ...]) -> None:
        avals, known = set(), list[str]()
        for name in names:
            member, _, put = name.partition(".")
            inputs = {one.name: one for one in self.members[member].program.inputs} if member in self.members else {}
            if put not in inputs or name in self.state or any(member == one.partition(".")[0] for one in known):
                self.form(f"shared: must name inputs of members, each once, and one of each: got {name}")
                continue
            known.append(name)
            avals.add((inputs[put].aval, inputs[put].place))
            self.state[name] = names[0]
        if len(avals) > 1:
            self.form(f"shared: one memory must have one shape, dtype and place: got {' '.join(names)}")

    def program(self, member: Member, *, captured: bool) -> None:
        """The law of a program; and rule 11, of what is captured."""
        for one in violations(member.program):
            rule = 11 if captured and one.rule == 5 else one.rule
            self.found.append(evolve(one, rule=rule, message=f"{member.name}: {one.message}"))
        for launch in member.program.launches if captured else ():
            named = f"{member.name}: {launch.op.name} ({(launch.results or launch.operands)[0]})"
            if launch.op.waits:
                text = f"{named} waits for the host, between begin and end of a capture; missing: one that does not"
                self.found.append(Violation(11, text, launch, order=True))
            if launch.op.on_host() and not launch.results:
                self.form(f"{named} can be updated, and must have a result, by which it is named")

    def malformed(self, action: Action) -> str:
        """What is wrong with the names in an action."""
        member = action.value.partition(".")[0] if isinstance(action, Drop) else getattr(action, "member", None)
        if member is not None and member not in self.members:
            return f"must name a member: got {member}"
        match action:
            case Capture() | Run() if member in self.captures:
                return "must be of a member that is not captured: it is; name its program a second time"
            case Read() if action.output not in self.facts[action.member].outputs:
                return f"must read an output of {member}: got {action.output}"
            case Drop() if self.place_of(action.value) is None:
                return "must let go of an output, or of a static input in a buffer of its own"
            case Fill() | Run():
                for put, source in action.takes:
                    owner, _, output = source.partition(".")
                    if put not in self.facts[action.member].inputs:
                        return f"must take data inputs of {member}: got {put}"
                    if isinstance(action, Run) and put in self.facts[action.member].shown:
                        return f"must take data inputs of {member} that no output lies in: got {put}"
                    if owner not in self.members or output not in self.facts[owner].outputs:
                        return f"must take outputs of members: got {source}"
        return ""

    def place_of(self, value: str) -> str | None:
        """What a drop of "member.value" gives back: an output that the program allocates, or a buffer of inputs."""
        member, _, name = value.partition(".")
        facts = self.facts[member]
        if isinstance(facts.outputs.get(name), str):
            return value
        return facts.static if name in facts.inputs and not self.members[member].staging else None

    # --- order -------------------------------------------------------------------

    def clock(self, stream: str) -> dict[str, int]:
        return self.clocks.setdefault(stream, {})

    def use(
        self, action: Action, stream: str = MAIN, reads: Iterable[Place] = (), writes: Iterable[Place] = (),
        ends: Iterable[Place] = (), lanes: frozenset[str] = frozenset(), life: Life | None = None,
    ) -> Use:  # fmt: skip
        """An action on a stream, held against all that it may run beside."""
        clock = self.clock(stream)
        seen = dict(clock)
        clock[stream] = clock.get(stream, 0) + 1
        places = frozenset(reads), frozenset(writes), frozenset(ends)
        use = Use(action, self.number, stream, clock[stream], seen, *places, lanes, life)
        for other, uses in self.uses.items():
            for earlier in reversed(uses if other != stream else ()):
                if earlier.before(use):
                    break
                self.beside(earlier, use)
        self.uses[stream].append(use)
        self.reading(use)
        return use

    def beside(self, first: Use, second: Use) -> None:
        """Two actions without an order, and what they may not have in common."""
        missing = f"missing order: {first} -> {second}"
        both = first.writes & (second.reads | second.writes | second.ends) | first.reads & (second.writes | second.ends)
        for kind, name in sorted(both):
            self.wrong(2, f"{first} and {second} share {kind} {name!r}; {missing}", first, second)
        if first.lanes & second.lanes:
            text = f"{first} and {second} are collectives, which all ranks must run in one order"
            self.wrong(6, f"{text}; {missing}", first, second)
        if first.life and second.life and first.life.may_be(second.life):
            text = f"{first} and {second} may use one memory of pool {first.life.member.pool!r}"
            self.wrong(first.life.whose(second.life), f"{text}; {missing}", first, second)
        for writer, reader in ((first, second), (second, first)):
            for kind, name in sorted(reader.reads):
                content = self.contents.get(name) if kind == "output" else None
                if content is None or writer.life is None:
                    continue
                if content.life is writer.life:
                    self.wrong(1, f"{reader} takes {name}, which {writer} gives; {missing}", first, second)
                elif isinstance(content.where, str) and content.may_be_written(writer):
                    text = f"{reader} takes {name}, and {writer} may write its memory"
                    self.wrong(content.life.whose(writer.life), f"{text}; {missing}", first, second)

    def record(self, record: Record) -> None:
        if record.event in self.events:
            text = f"event {record.event} is recorded twice"
            self.found.append(Violation(4, text, self.events[record.event][0], record))
        self.events[record.event] = (record, dict(self.clock(record.stream)))

    def wait(self, wait: Wait) -> None:
        if wait.event not in self.events:
            text = f"{wait.stream} waits for event {wait.event}, which is not recorded before"
            self.found.append(Violation(4, f"{text}; missing: record {wait.event}", None, wait))
            return
        see(self.clock(wait.stream), self.events[wait.event][1])
        self.waited.add(wait.event)

    # --- actions -------------------------------------------------------------------

    def act(self, action: Action) -> None:
        match action:
            case Reserve():
                asked = {action.buffer: action.size}
                self.room(asked, self.use(action, ends=self.replaced(asked)))
            case Capture():
                self.capture(action)
            case Update():
                self.update(action)
            case Fill() if captured := self.capture_of(action):
                self.fill(action, captured)
            case Replay() if captured := self.capture_of(action):
                self.replay(action, captured)
            case Release() if captured := self.capture_of(action):
                self.release(action, captured)
            case Run():
                self.run(action)
            case Read():
                self.use(action, action.stream, reads=self.sources((("", f"{action.member}.{action.output}"),)))
            case Drop():
                self.drop(action)
            case Record():
                self.record(action)
            case Wait():
                self.wait(action)

    def capture_of(self, action: Fill | Replay | Release) -> Captured | None:
        captured, gone = self.captures.get(action.member), self.released.get(action.member)
        if captured is None and gone is not None:
            text = f"{action} [{self.number}] comes after {gone}, which gave its memory back"
            self.found.append(Violation(7, text, gone.action, action))
        elif captured is None:
            self.form(f"'{action}' must be of a member that is captured: got {action.member}", action)
        return captured

    def capture(self, capture: Capture) -> None:
        member, facts = self.members[capture.member], self.facts[capture.member]
        use = self.use(capture, ends=self.replaced(dict(member.room)))
        self.room(dict(member.room), use)
        life = Life(member, facts, self.number, captured=True)
        self.captures[member.name] = Captured(use, life)
        self.take(life)
        if not member.staging:
            self.dropped.pop(facts.static, None)
            self.filled.pop(facts.static, None)
        self.released.pop(member.name, None)

    def take(self, life: Life) -> None:
        """A member has new memory, and what its outputs were is no more."""
        self.lives[life.member.name] = life
        for output in life.facts.outputs:
            self.contents.pop(f"{life.member.name}.{output}", None)
            self.dropped.pop(f"{life.member.name}.{output}", None)

    def replaced(self, asked: Mapping[str, int]) -> list[Place]:
        """What is no more when buffers grow to what is asked."""
        grown = [name for name, size in asked.items() if size > self.buffers[name].size]
        return [(kind, name) for name in grown for kind in ("workspace", "input")]

    def room(self, asked: Mapping[str, int], use: Use) -> None:
        """Buffers grow to what is asked."""
        for name, size in asked.items():
            if size > self.buffers[name].size:
                self.buffers[name] = Buffer(size, use)

    def same_buffers(self, captured: Captured, use: Use) -> None:
        """Rule 10: a graph knows buffers as they were before its capture, and that of its static inputs as it was then.

        A workspace cannot be made in a capture: it would be the pool's.
        """
        facts, since = captured.life.facts, captured.use.number
        for name in (*facts.workspaces, facts.static):
            grown = self.buffers[name].grown
            if grown is not None and (grown.number > since or (grown.number == since and name != facts.static)):
                text = f"{use} uses {name!r} as it was before {captured.use}, and {grown} has made it grow"
                missing = f"reserve {name} {self.buffers[name].size} before {captured.use}"
                self.wrong(10, f"{text}; missing: {missing}", grown, use)

    def fill(self, fill: Fill, captured: Captured) -> None:
        static = captured.life.facts.static
        use = self.use(fill, fill.stream, self.sources(fill.takes), [("input", static)] if static else [])
        self.apart(fill, use)
        self.spoil(use)
        self.filled[static] = (fill.member, use)

    def update(self, update: Update) -> None:
        captured = self.captures.get(update.member)
        if captured is None or update.launch not in captured.life.facts.updatable:
            what = "no capture" if captured is None else "no launch with operands on the host to set"
            self.found.append(Violation(9, f"'{update}' belongs to {what}", None, update))
            return
        use = self.use(update, update.stream)
        for replay in captured.replays:
            if not replay.before(use):
                self.wrong(9, f"{use} writes what {replay} reads; missing order: {replay} -> {use}", replay, use)
        captured.pending[update.launch].append(use)

    def replay(self, replay: Replay, captured: Captured) -> None:
        life, facts = captured.life, captured.life.facts
        use = self.use(replay, replay.stream, facts.reads, facts.writes, (), facts.lanes, life)
        self.static(captured, use)
        self.same_buffers(captured, use)
        if not life.member.pool and facts.streams:
            text = f"{use} uses memory that is anybody's since {captured.use}, all but that of its outputs"
            self.wrong(7, f"{text}; missing: a pool", captured.use, use)
        self.updated(captured, use)
        for one in (one for updates in captured.pending.values() for one in updates):
            see(self.clock(replay.stream), {**one.seen, one.stream: one.tick})
        captured.pending.clear()
        captured.replays = [one for one in captured.replays if not one.before(use)] + [use]
        self.gives(use, life)

    def updated(self, captured: Captured, use: Use) -> None:
        """Rule 9: each launch that is updatable has one update for this replay."""
        last = captured.replays[-1] if captured.replays else captured.use
        for launch in captured.life.facts.updatable:
            updates = captured.pending[launch]
            if not updates:
                text = f"{use} runs {launch}, and nothing has set its operands on the host since {last}"
                self.wrong(9, f"{text}; missing: update {captured.life.member.name}.{launch}", last, use)
            for one in updates[1:]:
                self.wrong(9, f"{updates[0]} and {one} are for one replay, {use}; missing: a replay between", one, use)

    def static(self, captured: Captured, use: Use) -> None:
        """Static inputs hold what was last filled for this program, and their memory has not been let go of."""
        place, member = captured.life.facts.static, captured.life.member
        if not place:
            return
        whose, fill = self.filled.get(place, ("", None))
        drop = self.dropped.get(place)
        if drop is not None:
            text = f"{use} takes static inputs, whose memory is anybody's since {drop}"
            self.wrong(7, f"{text}; missing order: {use} -> {drop}", drop, use)
        if fill is None:
            self.wrong(1, f"{use} takes static inputs; missing: fill {member.name}", captured.use, use)
        elif whose != member.name:
            text = f"{use} takes static inputs from {place!r}, which holds those of {fill}"
            self.wrong(7, f"{text}; missing: fill {member.name}", fill, use)

    def run(self, run: Run) -> None:
        member, facts = self.members[run.member], self.facts[run.member]
        life = Life(member, facts, self.number, captured=False)
        reads = [place for place in facts.reads if place[0] == "state"]
        reads, asked = [*reads, *self.sources(run.takes)], dict(member.room)
        use = self.use(run, MAIN, reads, facts.writes, self.replaced(asked), facts.lanes, life)
        self.apart(run, use)
        self.room(asked, use)
        self.take(life)
        self.gives(use, life)

    def apart(self, action: Fill | Run, use: Use) -> None:
        """Rule 2: what is taken does not lie where the action itself writes."""
        if use.writes.intersection(self.sources(action.takes)):
            text = f"{use} takes outputs from where it writes; missing: a copy of them"
            self.found.append(Violation(2, text, None, action))

    def sources(self, takes: tuple[Taken, ...]) -> list[Place]:
        """The outputs that are taken, and the memory that they lie in where that has a name."""
        found: list[Place] = []
        for _, source in takes:
            member, _, output = source.partition(".")
            where = self.facts[member].outputs[output]
            found += [("output", source), *([where] if isinstance(where, tuple) else [])]
        return found

    def spoil(self, use: Use) -> None:
        """What others' outputs hold is no more where this action may write their memory."""
        for content in self.contents.values():
            if content.may_be_written(use):
                content.spoiled = content.spoiled or use

    def gives(self, use: Use, life: Life) -> None:
        self.spoil(use)
        for output, where in life.facts.outputs.items():
            self.contents[f"{life.member.name}.{output}"] = Content(use, life, where)

    def reading(self, use: Use) -> None:
        """What an action reads of outputs is there, and is what was given last."""
        for name in sorted(name for kind, name in use.reads if kind == "output"):
            member, content = name.partition(".")[0], self.contents.get(name)
            gone, dropped = self.released.get(member), self.dropped.get(name)
            if gone is not None:
                self.wrong(7, f"{use} takes {name} after {gone}; missing order: {use} -> {gone}", gone, use)
            elif dropped is not None:
                text = f"{use} takes {name} after {dropped}"
                self.found.append(Violation(7, text, dropped.action, use.action))
            elif content is None:
                text = f"{use} takes {name}, which nothing gives; missing: a replay or a run of {member}"
                self.found.append(Violation(1, text, None, use.action))
            elif content.spoiled is not None and content.spoiled.before(use):
                self.spoilt(name, content, content.spoiled, use)

    def spoilt(self, name: str, content: Content, by: Use, use: Use) -> None:
        missing = f"missing order: {use} -> {by}"
        if isinstance(content.where, tuple) or by.life is None:
            self.wrong(2, f"{use} takes {name} of {content.made}, which {by} has replaced; {missing}", by, use)
            return
        text = f"{use} takes {name} of {content.made}, and {by} may have written that memory"
        where = f"of pool {content.life.member.pool!r}"
        self.wrong(content.life.whose(by.life), f"{text} {where}; {missing}", by, use)

    def drop(self, drop: Drop) -> None:
        """Memory is anybody's, or its pool's."""
        place, life = self.place_of(drop.value), self.lives.get(drop.value.partition(".")[0])
        if life is None or place is None:
            self.form(f"'{drop}' must let go of what is there", drop)
        else:
            self.dropped[place] = self.use(drop, writes=[("input", place)] if place != drop.value else [])

    def release(self, release: Release, captured: Captured) -> None:
        self.released[release.member] = self.use(release, life=captured.life)
        del self.captures[release.member]
