"""`mla-fx show` and `mla-fx check`: steps, programs, what they cost, and whether they are legal."""

import argparse

from attrs import evolve

from mla_fx import StepShape, attention_step, models
from mla_fx.cli import chosen_orchestration, named
from mla_fx.cli_backend import sizes
from mla_fx.cli_cost import report, table
from mla_fx.cli_growth import growth
from mla_fx.effects import (
    Drop,
    Effect,
    InputError,
    Keep,
    Launch,
    Program,
    Record,
    Stage,
    Step,
    Wait,
    ops,
    schedule,
    violations,
)
from mla_fx.models import ModelConfig


def _step(options: argparse.Namespace) -> tuple[ModelConfig, StepShape, Step]:
    config = models.load_config(options.model) if options.model else models.deepseek_v3_config()
    shape = StepShape(
        tokens=options.tokens,
        requests=options.tokens,
        dtype=options.dtype,
        **sizes(options),
        split=chosen_orchestration(options.orchestration).split,
    )
    if options.layers is None and shape.split == "layers":
        raise InputError(f"--orchestration: {options.orchestration} splits whole layers: must come with --layers")
    if options.layers is None:
        return config, shape, attention_step(config.attention, shape)
    return (
        config,
        shape,
        models.model_step(evolve(config, num_hidden_layers=options.layers), shape, rows=options.tokens),
    )


def _program(options: argparse.Namespace, step: Step) -> Program:
    return schedule(step, chosen_orchestration(options.orchestration), mode=options.mode)


def show(options: argparse.Namespace) -> int:
    """Run `mla-fx show`."""
    if options.ops:
        print(ops.listing())
        return 0
    if options.costs:
        print(table(options, lambda other: _program(other, _step(other)[2])))
        return 0
    config, shape, step = _step(options)
    if options.growth:
        print(growth(config.attention, shape, chosen_orchestration(options.orchestration)))
        return 0
    if options.step:
        print(step)
        return 0
    program = _program(options, step)
    if options.cost:
        print(report(program))
        return 0
    if options.device_trace:
        from mla_fx.cli_trace import device_trace

        return device_trace(options, config, shape, program)
    head, *lines = str(program).splitlines()
    width = len(str(len(program.effects)))
    print(head)
    for number, line in enumerate(lines):
        print(f"{number:>{width}}  {line}" if number < len(program.effects) else f"{'':>{width}}  {line}")
    print(f"\n{summary(program)}")
    return 0


def check(options: argparse.Namespace) -> int:
    """Run `mla-fx check`; 1 where the program is not legal."""
    program = named(options.program, "--program") if options.program else _program(options, _step(options)[2])
    if not isinstance(program, Program):
        raise InputError(f"--program: must be a Program: got {type(program).__name__}")
    if options.without is not None:
        if not 0 <= options.without < len(program.effects):
            raise InputError(f"--without: must be in 0..{len(program.effects) - 1}: got {options.without}")
        print(f"without {options.without}: {program.effects[options.without]}")
        program = program.without(options.without)
    found = violations(program)
    for violation in found:
        print(violation)
    print(f"{f'not legal: {len(found)} violations' if found else 'legal'}: {summary(program)}")
    return 1 if found else 0


_KINDS: dict[type[Effect], tuple[str, str]] = {
    Launch: ("launch", "launches"),
    Stage: ("stage", "stages"),
    Record: ("record", "records"),
    Wait: ("wait", "waits"),
    Keep: ("keep", "keeps"),
    Drop: ("drop", "drops"),
}


def summary(program: Program) -> str:
    """How many of each effect a program has, in words."""
    found = [(program.count(kind), *names) for kind, names in _KINDS.items()]
    counts = ", ".join(f"{count} {one if count == 1 else many}" for count, one, many in found)
    return f"{counts} on {len(program.streams)} streams ({', '.join(program.streams)})"
