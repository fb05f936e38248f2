"""What a compiled program costs over the same calls written by hand: measured in one run, in turn, as a difference.

The layer: 4 ranks, 16 heads, one request with 4096 cached tokens, hidden size
2048.  `by_hand` is the straight-line code a person would write for it: the
same rules, called with the same tensors, no checks.  The stack: 61 layers on
one rank, where the loading of the arguments and the packing of the results
weigh most; by hand it is the same calls in a loop.  `make bench` has them in its
table; the limits are held by the plain suite, with slack for a noisy machine.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from attrs import fields

from mla_fx import MlaConfig, backends, orchestrations
from mla_fx.backends import Backend, Collective, Executable, InProcess, Run, cpu
from mla_fx.backends.rules import parameters
from mla_fx.effects import Op, Program, ops, schedule
from mla_fx.rope import frequencies
from tests.benchmarks.table import BY_HAND, Point
from tests.setups import Setup

RANKS = 4
CONFIG = MlaConfig(
    hidden_size=2048,
    num_attention_heads=16,
    q_lora_rank=512,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
)
SETUP = Setup(ranks=RANKS, requests=1, tokens=1, block_size=128, table_width=9, dtype="bf16", config=CONFIG)
STACK = Setup(ranks=1, layers=61, requests=1, tokens=1)
RUNS = [Run(rank) for rank in range(RANKS)]
ANGLES = {"frequencies": frequencies(CONFIG), "magnitude": 1.0, "rounded": False}


class Nowhere(InProcess):
    """Ranks whose messages are nobody's: each is brought what it sent."""

    def move(self, how: Any, sent: Sequence[Any], *, group: str, spent: bool = False) -> list[Any]:
        """Nothing moves."""
        return list(sent)


def by_hand(params: Any, caches: Any, hidden: Any, batches: Any, rule: Any, world: InProcess) -> list[torch.Tensor]:
    """One step of the layer without a program."""
    scale, epsilon, group = CONFIG.softmax_scale, CONFIG.latent_norm_eps, SETUP.shape.tp

    def together(op: type[Op], operands: Sequence[Any]) -> list[Any]:
        send, receive = rule[op].send, rule[op].receive
        sent = [send(*mine, run=run, group=group) for mine, run in zip(operands, RUNS, strict=True)]
        moved = world.move(op.communicates, sent, group="tp")  # type: ignore[arg-type]
        return [receive(m, *mine, run=run, group=group) for m, mine, run in zip(moved, operands, RUNS, strict=True)]

    queries, history, current = [], [], []
    for run, p, x, batch in zip(RUNS, params, hidden, batches, strict=True):
        cos, sin = rule[ops.RopeAngles](batch.positions, x, run=run, **ANGLES)
        (q_a,) = rule[ops.Linear](x, p.query.q_a_proj, run=run)
        (q_a,) = rule[ops.RmsNorm](q_a, p.query.q_a_layernorm, run=run, epsilon=epsilon)
        (q,) = rule[ops.Linear](q_a, p.query.q_b_proj, run=run)
        (q_latent,) = rule[ops.AbsorbQuery](q, p.w_uk, run=run, rope=64)
        (q_rope,) = rule[ops.Rope](q, cos, sin, run=run, heads=4)
        (kv,) = rule[ops.Linear](x, p.kv_a_proj, run=run)
        (latent,) = rule[ops.RmsNorm](kv, p.kv_a_layernorm, run=run, epsilon=epsilon)
        (k_rope,) = rule[ops.Rope](kv, cos, sin, run=run, heads=None)
        queries.append((q_latent, q_rope))
        current.append((latent, k_rope))
    for run, cache, (latent, k_rope), batch in zip(RUNS, caches, current, batches, strict=True):
        rule[ops.WriteRows](cache.latent, latent, batch.slots, run=run)
        rule[ops.WriteRows](cache.rope, k_rope, batch.slots, run=run)
    for run, q, cache, batch in zip(RUNS, together(ops.GatherHeads, queries), caches, batches, strict=True):
        rest = (cache.latent, cache.rope, batch.block_table, batch.query_lengths, batch.history_lengths)
        history.append(rule[ops.HistoryAttention](*q, *rest, run=run, scale=scale, workspace=ops.WORKSPACE))
    local = [
        rule[ops.CurrentAttention](*q, *keys, batch.query_lengths, run=run, scale=scale, workspace=ops.WORKSPACE)
        for run, q, keys, batch in zip(RUNS, queries, current, batches, strict=True)
    ]
    parts = []
    for run, recv, cur, p in zip(RUNS, together(ops.AllToAll, history), local, params, strict=True):
        (attn,) = rule[ops.Combine](*recv, *cur, run=run, flat=False)
        (heads,) = rule[ops.VUp](attn, p.w_uv, run=run, group=None, flat=True)
        parts.append(rule[ops.Linear](heads, p.o_proj, run=run))
    return [out for (out,) in together(ops.AllReduce, parts)]


def compiled_layer() -> tuple[Executable, Any, tuple[Any, ...]]:
    """The compiled step, its parameters and its arguments."""
    program = schedule(SETUP.step, orchestrations.attention_aside)
    arguments = (SETUP.caches(), SETUP.hidden(), SETUP.batches(history=(4096,), query=(1,)))
    return SETUP.compiled(backends.get("cpu", ranks=RANKS), program), SETUP.params(), arguments


layer = pytest.fixture(compiled_layer, scope="module")


def calls_of(program: Program, ranks: int) -> int:
    """The calls that a body makes: one for every rank, one for all where they meet."""
    return sum(1 if launch.op.communicates else ranks for launch in program.launches)


def test_both_compute_the_same(layer):
    run, params, arguments = layer
    out, _ = run(*arguments)
    with torch.no_grad():
        right = by_hand(params, *arguments, cpu.TABLE.rules, InProcess(RANKS))
    for ours, hand in zip(out, right, strict=True):
        assert torch.equal(ours, hand)
    assert calls_of(run.program, RANKS) == 67


def seconds(function: Callable[..., Any], *arguments: Any) -> float:
    """As `timeit` does, without the collector, which looks at everything that the process holds."""
    gc.disable()
    start = time.perf_counter()
    function(*arguments)
    spent = time.perf_counter() - start
    gc.enable()
    return spent


def nothing(op: type[Op]) -> Any:
    """A rule of the right form that computes nothing."""
    results = (None,) * len(op.results)
    if op.communicates:
        return Collective(doing(op, None), doing(op, results))
    return doing(op, results)


def doing(op: type[Op], results: Any) -> Callable[..., Any]:
    """A function with the keywords of a rule, as real ones have, that gives these results."""
    match tuple(one.name for one in fields(op)):
        case ():
            return lambda *_, run: results
        case ("epsilon",):
            return lambda *_, run, epsilon: results
        case ("scale", "workspace"):
            return lambda *_, run, scale, workspace: results
        case ("flat",):
            return lambda *_, run, flat: results
        case ("group", "flat"):
            return lambda *_, run, group, flat: results
        case ("heads",):
            return lambda *_, run, heads: results
        case ("rope",):
            return lambda *_, run, rope: results
        case ("group",):
            return lambda *_, run, group: results
        case ("frequencies", "magnitude"):
            return lambda *_, run, frequencies, magnitude: results
    return lambda *_, run, **__: results


NOTHING = {op: nothing(op) for op in ops.ALL}


def emptied(setup: Setup, program: Program) -> Executable:
    """A program whose rules do nothing, and are not looked at, as in every run but an executable's first."""
    run = setup.compiled(Backend("empty", NOTHING, Nowhere(setup.ranks)), program)
    run.body.proven[0] = True  # type: ignore[attr-defined]
    return run


def test_overhead_is_within_its_limits(layer):
    """What surrounds a call costs at most three times the call itself, and all of it at most 3 % of the layer.

    With rules that do nothing, what is left is what surrounds the calls: loading
    and checking the arguments, the loop over rows, packing the results; less
    what the same calls, on nothing, cost by hand.  A call in this measure is one
    of a Python function with keywords, so that a slow machine is slow in both.
    """
    run, params, arguments = layer
    empty, calls = emptied(SETUP, run.program), calls_of(run.program, RANKS)
    whole = min(seconds(run, *arguments) for _ in range(10))
    pairs = [
        (seconds(empty, *arguments), seconds(by_hand, params, *arguments, NOTHING, Nowhere(RANKS))) for _ in range(500)
    ]
    hand = min(hand for _, hand in pairs)
    around = min(ours for ours, _ in pairs) - hand
    step, call = around * 1e6, around / calls * 1e6
    print(
        f"\naround the calls {step:.0f} us a step, {call:.2f} us a call, {around / whole:.2%} of a layer; "
        f"the calls {hand * 1e6:.0f} us"
    )
    assert around <= 3 * hand
    assert around <= 0.03 * whole


def calls_by_hand(program: Program) -> Callable[[], None]:
    """The calls of a program on one rank, one after the other, on nothing."""
    run, calls = RUNS[0], []
    for launch in program.launches:
        rule, given = NOTHING[type(launch.op)], parameters(launch.op)
        for half in (rule.send, rule.receive) if launch.op.communicates else (rule,):
            calls.append((half, (None,) * len(launch.operands), {"run": run, **given}))

    def by_hand() -> None:
        for rule, operands, given in calls:
            rule(*operands, **given)

    return by_hand


def test_overhead_of_61_layers():
    """What surrounds the calls of 61 layers costs at most twice the calls; compiling takes at most 300 such steps."""
    program = schedule(STACK.step, orchestrations.attention_aside)
    empty, hand = emptied(STACK, program), calls_by_hand(program)
    arguments = STACK.caches(), STACK.hidden(), STACK.batches(history=(9,), query=(1,))
    pairs = [(seconds(empty, *arguments), seconds(hand)) for _ in range(100)]
    calls = min(hand for _, hand in pairs)
    around = min(ours for ours, _ in pairs) - calls
    backend = backends.get("cpu")
    prepared = backend.prepare(program, STACK.params())
    compiling = seconds(backend.compile, program, prepared)
    if compiling > 300 * (around + calls):  # once more, where something else ran meanwhile
        compiling = min(compiling, seconds(backend.compile, program, prepared))
    print(
        f"\n61 layers: {around * 1e6:.0f} us a step around {len(program.launches)} calls of {calls * 1e6:.0f} us, "
        f"compiled in {compiling:.3f} s"
    )
    assert around <= 2 * calls
    assert compiling <= 300 * (around + calls)


def points(whole: bool = False) -> Iterator[Point]:
    """A layer beside the same calls by hand; and what is left where rules do nothing, of it and of 61 layers."""
    run, params, arguments = compiled_layer()
    rules, world = cpu.TABLE.rules, InProcess(RANKS)
    yield Point(
        "overhead",
        f"attention of a layer, bf16, {RANKS} ranks, 4k of history",
        lambda: run(*arguments)[0],
        {BY_HAND: lambda: by_hand(params, *arguments, rules, world)},
        dtype="bf16",
    )
    empty, nowhere = emptied(SETUP, run.program), Nowhere(RANKS)
    yield Point(
        "overhead",
        f"the same, {calls_of(run.program, RANKS)} calls of rules that do nothing",
        lambda: empty(*arguments) and None,
        {BY_HAND: lambda: by_hand(params, *arguments, NOTHING, nowhere) and None},
    )
    program = schedule(STACK.step, orchestrations.attention_aside)
    deep, given = emptied(STACK, program), (STACK.caches(), STACK.hidden(), STACK.batches(history=(9,), query=(1,)))
    yield Point(
        "overhead",
        f"61 layers, {len(program.launches)} calls of rules that do nothing",
        lambda: deep(*given) and None,
        {BY_HAND: calls_by_hand(program)},
    )
