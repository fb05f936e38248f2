"""`expand_current` and the rule that says when it pays: the same values, with a third of the multiply-adds."""

from collections import Counter

import pytest
from attrs import evolve

from mla_fx import MlaConfig, StepShape, attention_step, backends, orchestrations
from mla_fx.effects import InputError, Step, cost, ops, schedule
from mla_fx.passes import expand_current, expanding_saves
from tests.setups import Setup
from tests.test_orchestrations import LENGTHS, agree, close, leaves

MERGED = {"project_before_merge": True}
FORMS = [MERGED, {**MERGED, "replicate_query": True}]


@pytest.mark.parametrize("layers", [None, 2])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranks", [1, 4])
def test_it_gives_what_the_step_gave(form, layers, ranks):
    """The plain step's values, of requests that are longer than a token and of one that is cut short."""
    plain = Setup(ranks=ranks, layers=layers, tokens=8, dtype="fp64")
    passed = evolve(plain, expand_current=True, **form)
    exact = backends.get("reference", ranks=ranks)
    for lengths in (((9, 5), (1, 2)), ((0, 3), (5, 2))):
        wanted, got = (leaves(exact, schedule(s.step, orchestrations.serial), s, *lengths) for s in (plain, passed))
        close(got, wanted)


@pytest.mark.parametrize("name", ["attention-aside", "batch-pipelined"])
@pytest.mark.parametrize("form", FORMS)
def test_on_the_hostile_machine_too(name, form):
    setup = Setup(ranks=2, tokens=4, split=orchestrations.NAMED[name].split, expand_current=True, **form)
    agree(name, setup, LENGTHS[1], {"cpu": 3})


def kinds(step: Step) -> Counter[type]:
    return Counter(type(equation.op) for equation in step.equations)


@pytest.mark.parametrize("form", FORMS)
def test_one_op_takes_the_place_of_the_current_part(form):
    """Of the current part alone: the absorbed query is the history's, and nothing is left that nobody needs."""
    before, after = (Setup(ranks=2, expand_current=expand, **form).step for expand in (False, True))
    assert expand_current(before) == after
    gone = Counter({ops.CurrentAttention: 1, ops.VUp: 1, ops.LocalHeads: len(form) - 1})
    assert kinds(before) - kinds(after) == +gone
    assert kinds(after) - kinds(before) == Counter({ops.ExpandedAttention: 1})
    needed = {name for equation in after.equations for name in equation.operands} | set(after.outputs)
    assert all(needed.intersection(equation.results) for equation in after.equations)
    assert [put.aval for put in before.inputs] == [put.aval for put in after.inputs]


def test_it_runs_where_the_current_part_would():
    """Beside the exchange; and what crosses is what crossed."""
    programs = [
        schedule(Setup(ranks=2, expand_current=expand, **MERGED).step, orchestrations.attention_aside)
        for expand in (False, True)
    ]
    streams = {launch.stream for launch in programs[1].launches if isinstance(launch.op, ops.ExpandedAttention)}
    assert streams == {"side"}
    assert cost(programs[0]).sent == cost(programs[1]).sent


def test_a_step_that_merges_latents_stays_as_it_is():
    step = Setup(ranks=2).step
    assert expand_current(step) == step
    with pytest.raises(InputError, match="expand_current: must go with project_before_merge=True: got True without it"):
        StepShape(expand_current=True)


def multiply_adds(step: Step, lengths: tuple[int, ...]) -> int:
    """Of a step's attention, absorbed products and expansions, counted op by op from its shapes."""
    avals, pairs, total = step.avals(), sum(n * (n + 1) // 2 for n in lengths), 0
    for equation in step.equations:
        sizes = [avals[name].shape for name in equation.operands]
        match equation.op:
            case ops.CurrentAttention():
                heads, latent, rope = sizes[0][1], sizes[0][2], sizes[1][2]
                total += heads * pairs * (latent + rope + latent)
            case ops.ExpandedAttention():
                heads, rope, (_, nope, latent), value = sizes[1][1], sizes[1][2], sizes[4], sizes[5][2]
                total += heads * (pairs * (nope + rope + value) + sum(lengths) * latent * (nope + value))
            case ops.VUp():
                heads, latent, value = sizes[0][1], sizes[0][2], sizes[1][2]
                total += heads * sum(lengths) * latent * value
            case ops.AbsorbQuery():
                heads, nope, latent = sizes[1]
                total += heads * sum(lengths) * nope * latent
    return total


@pytest.mark.parametrize("lengths", [(1, 1), (64,), (169,), (170,), (340,), (341,), (1, 300, 20), (8192,)], ids=str)
@pytest.mark.parametrize(("ranks", "plain"), [(1, True), (1, False), (8, False)])
def test_the_rule_is_the_difference_of_the_steps(lengths, ranks, plain):
    config = MlaConfig.deepseek_v3()
    shape = StepShape(ranks=ranks, tokens=sum(lengths), requests=len(lengths), table_width=1)
    left = multiply_adds(attention_step(config, shape if plain else evolve(shape, **MERGED)), lengths)
    right = multiply_adds(attention_step(config, evolve(shape, expand_current=True, **MERGED)), lengths)
    assert left - right == expanding_saves(config, lengths, plain=plain) * (128 // ranks)


def test_one_token_a_request_never_pays():
    for config in (MlaConfig.deepseek_v3(), Setup().config):
        for plain in (False, True):
            assert expanding_saves(config, [1] * 4096, plain=plain) < 0 == expanding_saves(config, [], plain=plain)
