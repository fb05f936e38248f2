"""The named orchestrations on whole models and on one attention: the same bits as the serial program of the same step.

And what they change the step by: two micro-batches are the whole, prefetches change no value, and each pass gives what
the step gave before it.
"""

import itertools
from functools import cache

import pytest
import torch
from attrs import evolve
from torch.utils import _pytree as pytree

from mla_fx import StepShape, attention_step, backends, decode, orchestrations
from mla_fx.decode import attention_avals
from mla_fx.effects import (
    MAIN,
    InputError,
    Keep,
    Launch,
    Record,
    ScheduleError,
    StepError,
    Wait,
    check,
    ops,
    schedule,
    violations,
)
from mla_fx.models import deepseek_v3_config, model_step
from mla_fx.passes import prefetch_weights, project_before_merge, replicate_query
from tests.setups import CONFIG, Setup

NAMES = [name for name in orchestrations.NAMED if name != "serial"]
#: What can be said of the attention of one layer; the others place experts.
OF_ATTENTION = ["exchange-aside", "attention-aside", "batch-pipelined", "prefetch"]
RANKS = (1, 2, 4, 8)
#: History and new tokens of two requests: each micro-batch with a padded row; the second request cut; the first alone.
LENGTHS = [((9, 5), (1, 2)), ((0, 3), (1, 3)), ((7, 2), (1, 0))]


def of(name, **sizes):
    """A step that an orchestration is for: a layer of one network and one of experts, or an attention."""
    sizes = {"layers": None if name in OF_ATTENTION[:2] else 2, "tokens": 4, **sizes}
    return Setup(split=orchestrations.NAMED[name].split, **sizes)


def serially(step, name):
    """The serial program of the step that the orchestration schedules."""
    for one in orchestrations.NAMED[name].passes:
        step = one(step)
    return schedule(step, orchestrations.serial)


@cache
def params(setup):
    return setup.params()


def leaves(backend, program, setup, history=(9, 5), query=(1, 2)):
    """Outputs and caches of one step, on the host."""
    given = setup.caches(), setup.hidden(), setup.batches(history, query)
    run = backend.compile(program, backend.prepare(program, params(setup)))
    return [leaf.cpu() for leaf in pytree.tree_leaves(run(*backend.put(given, copy=True)))]


def same(left, right):
    assert len(left) == len(right)
    assert all(map(torch.equal, left, right))


def close(left, right, tolerance=1e-12):
    for ours, exactly in zip(left, right, strict=True):
        torch.testing.assert_close(ours, exactly, rtol=tolerance, atol=tolerance)


def agree(name, setup, lengths, seeds, mode="minimal"):
    """Plain and hostile, under so many seeds on each backend: the bits of the serial program."""
    program = schedule(setup.step, orchestrations.NAMED[name], mode=mode)
    check(program)
    for kind, count in seeds.items():
        wanted = leaves(backends.get(kind, ranks=setup.ranks), serially(setup.step, name), setup, *lengths)
        assert all(leaf.isfinite().all() for leaf in wanted)
        for seed in (None, *range(count)):
            made = backends.get(kind, ranks=setup.ranks, adversary=seed)
            same(leaves(made, program, setup, *lengths), wanted)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [2])
def test_the_bits_are_those_of_the_serial_program(name, ranks):
    agree(name, of(name, ranks=ranks), LENGTHS[1], {"cpu": 2})


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("mode", ["minimal", "conservative"])
@pytest.mark.parametrize(
    "form", [{}, {"replicate_query": True, "project_before_merge": True}, {"quantization": "w8a8"}]
)
def test_everywhere_the_bits_are_those_of_the_serial_program(name, ranks, lengths, form, mode):
    layers = 3 if name not in OF_ATTENTION else 2
    agree(name, of(name, ranks=ranks, layers=layers, **form), lengths, {"cpu": 2, "reference": 1}, mode)
    if name in OF_ATTENTION:
        agree(name, of(name, ranks=ranks, layers=None, **form), lengths, {"cpu": 2, "reference": 1}, mode)


# --- micro-batches ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("split", "layers"), [("attention", None), ("attention", 2), ("layers", 2)])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_two_micro_batches_are_the_whole(split, layers, lengths):
    """In float64, whichever request the cut goes through; caches get the same rows."""
    whole = Setup(ranks=2, layers=layers, tokens=4, dtype="fp64")
    parts = evolve(whole, split=split)
    exact = backends.get("reference", ranks=2)
    wanted, got = (leaves(exact, schedule(one.step, orchestrations.serial), one, *lengths) for one in (whole, parts))
    close(got, wanted, 1e-11)


@pytest.mark.parametrize("tokens", [2, 3, 5])
def test_halves_of_any_size(tokens):
    whole = Setup(ranks=2, tokens=tokens, dtype="fp64")
    parts = evolve(whole, split="attention")
    assert [part.tokens for part in parts.shape.parts] == [tokens - tokens // 2, tokens // 2]
    exact = backends.get("reference", ranks=2)
    wanted, got = (
        leaves(exact, schedule(one.step, orchestrations.serial), one, (9, 5), (0, 2)) for one in (whole, parts)
    )
    close(got, wanted, 1e-11)


def test_a_step_of_one_token_is_not_split():
    with pytest.raises(InputError, match="tokens: must be at least 2 to be split into micro-batches: got 1"):
        StepShape(tokens=1, split="attention")
    with pytest.raises(InputError, match="split: must be one of None, attention, layers: got 'heads'"):
        StepShape(tokens=4, split="heads")
    with pytest.raises(InputError, match="split: the attention of one layer can be split as 'attention': got 'layers'"):
        attention_step(CONFIG, StepShape(tokens=4, split="layers"))


@pytest.mark.parametrize("name", ["batch-pipelined", "dual-batch"])
def test_micro_batches_are_asked_for(name):
    """Of a step that nobody has split there is nothing to put beside each other."""
    whole = evolve(of(name, layers=1), split=None)
    with pytest.raises(ScheduleError, match=r"model_step .*: must be split into micro-batches, as StepShape\(split="):
        schedule(whole.step, orchestrations.NAMED[name])


def test_each_micro_batch_has_a_workspace_of_its_own():
    launches = schedule(of("dual-batch").step, orchestrations.dual_batch).launches
    used = {(launch.stream, name) for launch in launches for name in launch.op.uses}
    assert used == {(MAIN, "workspace_0"), ("side", "workspace_1")}


# --- what runs beside what -------------------------------------------------------------------------


def follows(program):
    """Of every two launches whether the first one must have run when the second does, by streams, events and nothing
    else: a reading of the program of its own."""
    before, streams, events = {}, {}, {}
    for effect in program:
        stream = getattr(effect, "stream", MAIN)
        seen = streams.setdefault(stream, set())
        if isinstance(effect, Launch):
            before[effect.results] = set(seen)
            seen.add(effect.results)
        elif isinstance(effect, Wait):
            seen |= events[effect.event]
        elif hasattr(effect, "event"):
            events[effect.event] = set(seen)
    return before


def beside(program, one, other):
    """Whether neither of two launches must wait for the other."""
    before = follows(program)
    return one.results not in before[other.results] and other.results not in before[one.results]


def launches(program, kind, scope=""):
    return [one for one in program.launches if isinstance(one.op, kind) and f".{scope}" in f".{one.tag}"]


def test_the_exchange_of_one_half_runs_beside_the_history_attention_of_the_other():
    program = schedule(of("batch-pipelined").step, orchestrations.batch_pipelined)
    for layer in (0, 1):
        first = launches(program, ops.AllToAll, f"layers.{layer}.attention.batch.0")
        second = launches(program, ops.HistoryAttention, f"layers.{layer}.attention.batch.1")
        assert len(first) == len(second) == 1
        assert beside(program, *first, *second)


def test_the_attention_of_one_micro_batch_runs_beside_the_experts_of_the_other():
    """In both directions: of the second beside the experts of the first, then of the first, a layer on."""
    program = schedule(of("dual-batch", layers=3).step, orchestrations.dual_batch)
    for layer, number in itertools.product((1, 2), (0, 1)):
        other = (1 - number, layer + number)
        if other[1] > 2:
            continue
        experts = launches(program, ops.GroupedLinear, f"batch.{number}.layers.{layer}.feed_forward")
        attention = [
            *launches(program, ops.HistoryAttention, f"batch.{other[0]}.layers.{other[1]}.attention"),
            *launches(program, ops.AllToAll, f"batch.{other[0]}.layers.{other[1]}.attention"),
        ]
        assert len(experts) == len(attention) == 2
        assert all(beside(program, one, two) for one in experts for two in attention)


def test_shared_experts_run_beside_routed_ones():
    program = schedule(of("shared-experts-aside").step, orchestrations.shared_experts_aside)
    shared = launches(program, ops.Linear, "layers.1.feed_forward.shared_experts")
    routed = launches(program, ops.GroupedLinear, "layers.1.feed_forward")
    assert len(shared) == len(routed) == 2
    assert all(beside(program, one, two) for one in shared for two in routed)
    assert program.launches.index(shared[-1]) < program.launches.index(launches(program, ops.GateLogits)[0])


def test_collectives_are_issued_in_one_order():
    """Whatever the streams, each follows the one before it."""
    for name in NAMES:
        program = schedule(of(name).step, orchestrations.NAMED[name])
        before = follows(program)
        collectives = [launch for launch in program.launches if launch.op.communicates]
        assert all(one.results in before[two.results] for one, two in itertools.pairwise(collectives))


@pytest.mark.parametrize("name", NAMES)
def test_no_order_and_no_keep_is_there_for_nothing(name):
    """Without any one Record, Wait or Keep the law refuses the program."""
    program = schedule(of(name).step, orchestrations.NAMED[name])
    needed = [k for k, effect in enumerate(program) if isinstance(effect, Record | Wait | Keep)]
    assert needed and all(violations(program.without(k)) for k in needed)


# --- passes ----------------------------------------------------------------------------------------


def between_collectives(equations, pick):
    """What `pick` gives of the equations behind each collective, up to the next one."""
    found = [[]]
    for equation in equations:
        if equation.op.communicates:
            found.append([])
        found[-1] += pick(equation)
    return found


def test_what_is_fetched():
    """Beside each collective the projections' weights that are read behind it, in their order, and no expert's."""
    step = of("prefetch").step
    read = {ops.Linear: slice(1, 2), ops.VUp: slice(1, 2)}
    wanted = between_collectives(step.equations, lambda e: e.operands[read.get(type(e.op), slice(0))])
    passed = prefetch_weights(step)
    assert [e for e in passed.equations if not isinstance(e.op, ops.Prefetch)] == list(step.equations)
    fetched = between_collectives(passed.equations, lambda e: e.operands[:1] if isinstance(e.op, ops.Prefetch) else ())
    # A prefetch stands before its collective, so behind the one before that.
    assert fetched[:-1] == wanted[1:] and fetched[-1] == []
    experts = [f"params.layers[1].feed_forward.{name}_proj" for name in ("gate_up", "down")]
    assert set(experts) < set(step.avals()) and not set(experts) & set(itertools.chain.from_iterable(fetched))


def test_a_prefetch_is_a_hint():
    """Nothing but the end waits for one; the LSEs that it follows are kept, and nothing else is."""
    setup = of("prefetch", layers=None)
    program = schedule(setup.step, orchestrations.prefetch)
    before = follows(program)
    fetches = [launch for launch in program.launches if isinstance(launch.op, ops.Prefetch)]
    assert [launch.operands for launch in fetches] == [("params.w_uv", "hist_lse"), ("params.o_proj", "hist_lse")]
    assert all(("recv", "recv_lse") not in before[one.results] for one in fetches)
    assert {effect.value for effect in program if isinstance(effect, Keep)} == {"hist_lse"}


@pytest.mark.parametrize("layers", [None, 2])
@pytest.mark.parametrize("form", ["replicate_query", "project_before_merge"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_pass_gives_what_the_step_gave(form, layers, ranks):
    plain = Setup(ranks=ranks, layers=layers, tokens=4, dtype="fp64")
    passed = evolve(plain, **{form: True})
    exact = backends.get("reference", ranks=ranks)
    wanted, got = (leaves(exact, schedule(one.step, orchestrations.serial), one) for one in (plain, passed))
    close(got, wanted)


@pytest.mark.parametrize("form", [{"replicate_query": True}, {"project_before_merge": True}])
@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("quantization", [None, "w8a8"])
def test_a_pass_asks_for_what_the_table_of_weights_gives(form, lora, quantization):
    """Two places say the shapes of the parameters: the pass, and the table that a rank's part is cut by."""
    config = CONFIG if lora else evolve(CONFIG, q_lora_rank=None)
    for ranks in RANKS:
        shape = StepShape(ranks=ranks, tokens=4, quantization=quantization, **form)
        asked = [put.aval for put in attention_step(config, shape).inputs if put.role == "parameter"]
        assert asked == pytree.tree_leaves(attention_avals(config, shape))


def test_replicated_queries_are_two_slices_and_no_collective():
    plain, passed = (Setup(ranks=4, replicate_query=one).step for one in (False, True))
    assert replicate_query(plain) == passed
    kinds = [[type(e.op) for e in step.equations] for step in (plain, passed)]
    assert kinds[1] == [
        kind for one in kinds[0] for kind in ([ops.LocalHeads] * 2 if one is ops.GatherHeads else [one])
    ]


def test_values_cross_in_place_of_latents():
    """Bytes of a head and token: V values in place of L, and the LSE beside them."""
    config = evolve(CONFIG, kv_lora_rank=512, v_head_dim=128)
    for form, features in (({}, 512), ({"project_before_merge": True}, 128)):
        step = attention_step(config, StepShape(ranks=4, tokens=3, **form))
        (exchange,) = (e for e in step.equations if isinstance(e.op, ops.AllToAll))
        out, lse = (step.avals()[name] for name in exchange.operands)
        assert (out.shape, lse.shape) == ((3, 8, features), (3, 8))
    assert project_before_merge(attention_step(config, StepShape(ranks=4, tokens=3))) == step


def test_a_step_that_is_not_what_a_pass_takes_it_for_is_refused():
    step = Setup(ranks=2, replicate_query=True).step
    assert replicate_query(step) == step  # nothing is gathered any more
    merged = Setup(ranks=2, project_before_merge=True).step
    with pytest.raises(StepError, match="hist must be a result of combine: got 'hist, hist_lse = history_attention"):
        project_before_merge(merged)


def test_the_stack_of_deepseek_v3_is_legal():
    config, shape = evolve(deepseek_v3_config(), num_hidden_layers=5), StepShape(ranks=8, tokens=4, requests=4)
    for name in NAMES:
        one = orchestrations.NAMED[name]
        for form in ({}, {"replicate_query": True, "project_before_merge": True}):
            check(schedule(model_step(config, evolve(shape, split=one.split, **form)), one))


# --- faults ----------------------------------------------------------------------------------------


def forgotten_history(patch):
    """The second micro-batch takes as history what was there before the step."""
    whole = decode.plan_batch

    def forgetful(sharding, *, tokens, history, query, **sizes):
        parts = decode_parts(sharding, tokens=tokens, history=history, query=query, **sizes)
        before = whole(sharding, tokens=sum(tokens), history=history, query=query, **sizes)
        return [
            (first, rest._replace(history_lengths=all_.history_lengths))
            for (first, rest), all_ in zip(parts, before, strict=True)
        ]

    decode_parts = decode.plan_parts
    patch.setattr(decode, "plan_parts", forgetful)


def one_cache_for_each(patch):
    """The second micro-batch writes what the step was given, and the first one's rows are lost."""
    original = decode.in_parts

    def apart(split, function, x, params, cache, angles, batch, *, config, shape):
        def fresh(x, params, _, angles, batch, *, config, shape):
            out, written = function(x, params, cache, angles, batch, config=config, shape=shape)
            return out, written

        return original(split, fresh, x, params, cache, angles, batch, config=config, shape=shape)

    patch.setattr(decode, "in_parts", apart)


@pytest.mark.parametrize(("fault", "seen"), [(forgotten_history, AssertionError), (one_cache_for_each, ScheduleError)])
def test_a_fault_of_the_split_is_seen(monkeypatch, fault, seen):
    test_two_micro_batches_are_the_whole("attention", None, LENGTHS[1])
    fault(monkeypatch)
    with pytest.raises(seen):
        test_two_micro_batches_are_the_whole("attention", None, LENGTHS[1])


def test_an_order_that_is_not_staggered_is_seen(monkeypatch):
    """Both micro-batches at once: the attention of the first waits for the collectives of the other's experts."""
    level = orchestrations._halves
    monkeypatch.setattr(orchestrations, "_halves", lambda number, mine: level(0, mine))
    with pytest.raises(AssertionError):
        test_the_attention_of_one_micro_batch_runs_beside_the_experts_of_the_other()


def test_a_wait_for_a_prefetch_is_seen(monkeypatch):
    """As if the weight were read from what it brings."""
    fetched = orchestrations.prefetch
    monkeypatch.setattr(orchestrations, "prefetch", evolve(fetched, stream=lambda equation: MAIN, streams=()))
    with pytest.raises(AssertionError):
        test_a_prefetch_is_a_hint()
