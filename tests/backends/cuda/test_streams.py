"""What a GPU is told: exactly the effects of the program, in their order, on the streams that it says."""

import weakref

import pytest

from mla_fx import orchestrations
from mla_fx.backends import cuda
from mla_fx.backends.torch_streams import OnStreams
from mla_fx.effects import MAIN, Drop, InputError, Keep, Launch, Record, Wait, schedule
from tests.backends.cuda.conftest import Event
from tests.setups import Setup

each_orchestration = pytest.mark.parametrize("orchestration", orchestrations.NAMED)


class Observed:
    """A program on the stand-in, whose rules log the stream they run on and the end of what they made."""

    def __init__(self, machine, program, ranks):
        self.machine, self.program, self.ranks = machine, program, ranks
        launches = [launch for launch in program.launches for _ in range(1 if launch.op.communicates else ranks)]
        self.due = iter(launches)
        self.turn = 0
        rules = {op: self.watched(op, rule) for op, rule in cuda.RULES.items()}
        self.run = machine.backend(ranks).with_rules(rules).compile(program)
        assert isinstance(self.run.body, OnStreams)
        self.streams = {stream: key for key, stream in self.run.body.streams.items()}
        self.events = {event: key for key, event in self.run.body.events.items()}

    def watched(self, op, rule):
        def alone(*operands, **how):
            launch, rank = next(self.due), self.turn
            self.turn = (self.turn + 1) % self.ranks
            assert type(launch.op) is op
            self.begin(launch)
            results = rule(*operands, **how)
            self.made(launch, rank, results)
            return results

        def together(operands, **how):
            launch = next(self.due)
            assert type(launch.op) is op
            for number, results in enumerate(rule(operands, **how)):
                self.begin(launch)
                if results is not None:
                    self.made(launch, number % self.ranks, results)
                yield results

        return together if op.communicates else alone

    def begin(self, launch):
        self.machine.log.append(("launch", launch.op.name, self.machine.current))

    def made(self, launch, rank, results):
        for k, (name, tensor) in enumerate(zip(launch.results, results, strict=True)):
            if k not in launch.op.writes.values():  # a state is its owner's
                self.machine.labels[id(tensor)] = (name, rank)
                weakref.finalize(tensor, self.machine.log.append, ("drop", name, rank))

    def entry(self, kind, *rest):
        """An entry of the log in the words of the program; None for a meeting of a collective."""
        match kind:
            case "launch":
                return ("launch", rest[0], *self.streams[rest[1]])
            case "record" | "wait":
                if rest[0] not in self.events:
                    return None
                rank, name = self.events[rest[0]]
                stream = self.streams.get(rest[1], (rank, "caller"))
                return (kind, name, rank, *stream)
            case "keep":
                name, rank = rest[0]
                return ("keep", name, rank, *self.streams.get(rest[1], (rank, "caller")))
            case _:
                return (kind, *rest)

    def __call__(self, *arguments):
        out = self.run(*arguments)
        entries = [self.entry(*entry) for entry in self.machine.log]
        del out
        return [entry for entry in entries if entry is not None]


def expected(program, ranks):
    """The log that the effects ask for, and the way in and out."""
    every = range(ranks)
    log = [("record", "<start>", 0, 0, "caller"), *(("wait", "<start>", 0, rank, MAIN) for rank in every)]
    for effect in program.effects:
        match effect:
            case Launch():
                rounds = {"all_to_all": 2}.get(effect.op.name, 1)
                log += [("launch", effect.op.name, rank, effect.stream) for _ in range(rounds) for rank in every]
            case Record():
                log += [("record", effect.event, rank, rank, effect.stream) for rank in every]
            case Wait():
                log += [("wait", effect.event, rank, rank, effect.stream) for rank in every]
            case Keep():
                log += [("keep", effect.value, rank, rank, effect.stream) for rank in every]
            case Drop():
                log += [("drop", effect.value, rank) for rank in every]
    for rank in every:
        log += [("record", "<end>", rank, rank, MAIN), ("wait", "<end>", rank, rank, "caller")]
    home, root = program.home(), program.memory()
    outputs = [name for name in dict.fromkeys(program.outputs) if root[name] in home]
    return log + [("keep", name, rank, rank, "caller") for name in outputs for rank in every]


@each_orchestration
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("layers", [None, 3])
@pytest.mark.parametrize("mode", ["minimal", "conservative"])
def test_every_effect_is_one_call_in_order(machine, orchestration, ranks, layers, mode):
    """Conservative programs keep what crosses streams; minimal ones drop it where order protects it."""
    given = Setup(ranks=ranks, layers=layers)
    program = schedule(given.step, orchestrations.NAMED[orchestration], mode=mode)
    got = Observed(machine, program, ranks)(*given.arguments())
    assert got == expected(program, ranks)
    kept = any(isinstance(effect, Keep) for effect in program.effects)
    assert kept == (mode == "conservative" and orchestration != "serial")


def test_a_collective_meets_before_and_behind_every_round(machine):
    """Each rank's stream waits, through the first one's, for what every rank's stream was given before."""
    given = Setup(ranks=4)
    program = schedule(given.step, orchestrations.attention_aside)
    seen = Observed(machine, program, 4)
    seen.run(*given.arguments())
    log = [e for e in machine.log if e[0] == "launch" or (isinstance(e[1], Event) and e[1] not in seen.events)]
    rounds = {"gather_heads": 1, "all_to_all": 2, "all_reduce": 1}
    for launch in program.launches:
        if not launch.op.communicates:
            continue
        at = next(k for k, entry in enumerate(log) if entry[1] == launch.op.name)
        streams = [key for key in seen.streams if seen.streams[key][1] == launch.stream]
        first, rest = streams[0], streams[1:]
        for _ in range(rounds[launch.op.name]):
            verify_meeting(log[at - 10 : at], first, rest)
            assert [entry[1:] for entry in log[at : at + 4]] == [(launch.op.name, stream) for stream in streams]
            at += 14
        verify_meeting(log[at - 10 : at], first, rest)


def verify_meeting(calls, first, rest):
    """The first stream waits for the others, then they for it: an event each."""
    events = [entry[1] for entry in calls]
    assert len(set(events)) == 1 + len(rest)
    wanted = []
    for stream, event in zip(rest, events[: 2 * len(rest) : 2], strict=True):
        wanted += [("record", event, stream), ("wait", event, first)]
    last = events[-1]
    assert calls == [*wanted, ("record", last, first), *(("wait", last, stream) for stream in rest)]


def test_the_callers_stream_is_current_again(machine):
    given = Setup(ranks=2)
    run = machine.backend(2).compile(schedule(given.step, orchestrations.attention_aside))
    run(*given.arguments())
    assert machine.current is machine.caller


def test_nothing_that_was_issued_outlives_a_rule_that_fails(machine):
    def rule(*operands, **how):
        raise InputError("no")

    given = Setup(ranks=2)
    program = schedule(given.step, orchestrations.attention_aside)
    last = type(program.launches[-1].op)
    run = machine.backend(2).with_rules({last: rule}).compile(program)
    with pytest.raises(InputError, match="no"):
        run(*given.arguments())
    assert machine.log[-1] == ("synchronize",)
    assert machine.current is machine.caller
