"""What a GPU is told: exactly the effects of the program, in their order, on the streams that it says."""

import weakref

import pytest

from mla_fx import orchestrations
from mla_fx.backends import Collective, RunError, cuda
from mla_fx.effects import Drop, InputError, Keep, Launch, Record, Stage, Wait, schedule
from tests.cases import pairwise
from tests.setups import ANYWHERE, Setup


class Observed:
    """A program on the stand-in, whose rules log the stream they run on and the end of what they made."""

    def __init__(self, machine, given, program):
        self.machine, self.ranks = machine, given.ranks
        self.due = iter([launch for launch in program.launches for _ in range(given.ranks)])
        rules = {op: self.watched(op, rule) for op, rule in cuda.TABLE.rules.items()}
        backend = machine.backend(given.ranks, cuda.TABLE, "cuda").with_rules(rules)
        self.run = given.compiled(backend, program)

    def watched(self, op, rule):
        if isinstance(rule, Collective):
            return Collective(rule.send, self.logged(op, rule.receive))
        return self.logged(op, rule)

    def logged(self, op, rule):
        def logs(*operands, run, **how):
            launch = next(self.due)
            assert type(launch.op) is op
            self.machine.say("launch", launch.op.name, self.machine.module.current)
            results = rule(*operands, run=run, **how)
            for k, (name, tensor) in enumerate(zip(launch.results, results, strict=True)):
                if k not in launch.op.written().values():  # a state is its owner's
                    self.machine.labels[id(tensor)] = f"{name} of {run.rank}"
                    weakref.finalize(tensor, self.machine.say, "free", f"{name} of {run.rank}")
            return results

        return logs


def expected(program, ranks):
    """What the effects ask for; a stream is made current where another one was."""
    log, current = [], "caller"

    def on(stream):
        return {"main": "caller"}.get(stream, stream)

    for effect in program.effects:
        match effect:
            case Stage():
                log.append("sent at caller")
            case Launch():
                if on(effect.stream) != current:
                    current = on(effect.stream)
                    log.append(f"on {current}")
                log += [f"{effect.op.name} on {current}"] * ranks
            case Record():
                log.append(f"{effect.event} at {on(effect.stream)}")
            case Wait():
                log.append(f"{on(effect.stream)} waits {effect.event}")
            case Keep():
                log += [f"keep {effect.value} of {rank} for {on(effect.stream)}" for rank in range(ranks)]
            case Drop():
                log += [f"free {effect.value} of {rank}" for rank in range(ranks)]
    return [*log, "on caller"]


@pytest.mark.parametrize(
    *pairwise(orchestration=ANYWHERE, ranks=(1, 2, 4), layers=(None, 3), mode=("minimal", "conservative"))
)
def test_every_effect_is_one_call_in_order(machine, orchestration, ranks, layers, mode):
    """Conservative programs keep what crosses streams; minimal ones drop it where order protects it."""
    given = Setup(ranks=ranks, layers=layers)
    program = schedule(given.step, orchestrations.NAMED[orchestration], mode=mode)
    seen = Observed(machine, given, program)
    assert machine.told(lambda: seen.run(*given.arguments())) == expected(program, ranks)
    kept = any(isinstance(effect, Keep) for effect in program.effects)
    assert kept == (mode == "conservative" and orchestration != "serial")


def test_the_callers_stream_is_current_again(machine):
    given = Setup(ranks=2)
    backend = machine.backend(2, cuda.TABLE, "cuda")
    given.compiled(backend, schedule(given.step, orchestrations.attention_aside))(*given.arguments())
    assert machine.module.current is machine.caller


def test_nothing_that_was_issued_outlives_a_rule_that_fails(machine):
    def rule(*operands, **how):
        raise InputError("no")

    given = Setup(ranks=2)
    program = schedule(given.step, orchestrations.attention_aside)
    last = [type(launch.op) for launch in program.launches if not launch.op.communicates][-1]
    run = given.compiled(machine.backend(2, cuda.TABLE, "cuda").with_rules({last: rule}), program)
    machine.module.log.clear()
    with pytest.raises(RunError, match="on stream main, rank 0: InputError: no"):
        run(*given.arguments())
    told = machine.told_so_far()
    assert told[told.index("synchronize") :][:2] == ["synchronize", "on caller"]
    assert machine.module.current is machine.caller
