"""The decode step on the hostile machine: right under every seed, and each Record, Wait and Keep is needed.

The toy programs of `tests/effects/test_law_teeth.py` show it for random
computations; here are the real operators, in one layer and in a stack.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from attrs import evolve
from torch.utils import _pytree as pytree

from mla_fx import (
    absorb_query,
    all_reduce,
    all_to_all,
    backends,
    combine,
    current_attention,
    gather_heads,
    history_attention,
    linear,
    orchestrations,
    rms_norm,
    rope,
    rope_angles,
    v_up,
    write_cache,
)
from mla_fx.backends import Executable
from mla_fx.backends.adversary import Adversary
from mla_fx.decode import attention_avals, batch_avals, cache_avals, query
from mla_fx.effects import (
    MAIN,
    Aval,
    Equation,
    Keep,
    Orchestration,
    Program,
    Record,
    Step,
    Wait,
    check,
    ops,
    parameters,
    schedule,
    trace,
    violations,
)
from mla_fx.models import Loader, mtp_step
from tests.cases import mostly_soak, pairwise
from tests.setups import ANYWHERE, Setup, checkpoint, model_config


def by_kind(equation: Equation) -> str:
    """Four streams: keys and their cache writes, current attention, exchanges, and the rest."""
    if isinstance(equation.op, ops.CurrentAttention):
        return "side"
    if isinstance(equation.op, ops.AllToAll | ops.GatherHeads | ops.AllReduce):
        return "comm"
    return "keys" if equation.within("keys") else MAIN


def write_aside(equation: Equation) -> str:
    """The cache writes off the way of everything else."""
    return "keys" if isinstance(equation.op, ops.WriteRows) else MAIN


def late_write(setup: Setup) -> Step:
    """A layer composed otherwise: history reads the version before this step's write, which nobody waits for."""
    config, shape = setup.config, setup.shape

    def attention(params, cache, x, batch):
        angles = rope_angles(batch.positions, x, config=config)
        q = query(x, params.query, epsilon=1e-6)
        q_latent, q_rope = absorb_query(q, params.w_uk, rope=config.qk_rope_head_dim), rope(q, *angles, heads=4)
        kv = linear(x, params.kv_a_proj)
        latent, k_rope = rms_norm(kv, params.kv_a_layernorm, epsilon=1e-6), rope(kv, *angles)
        written = write_cache(cache, latent, k_rope, batch.slots)
        lengths, scale = (batch.query_lengths, batch.history_lengths), config.softmax_scale
        cur, cur_lse = current_attention(q_latent, q_rope, latent, k_rope, batch.query_lengths, scale=scale)
        everybody = gather_heads(q_latent, q_rope, group=shape.dcp)
        hist, hist_lse = history_attention(*everybody, cache, batch.block_table, *lengths, scale=scale)
        attn = combine(*all_to_all(hist, hist_lse, group=shape.dcp), cur, cur_lse)
        return all_reduce(linear(v_up(attn, params.w_uv), params.o_proj), group=shape.tp), written

    return trace(
        attention,
        "late_write",
        params=parameters(attention_avals(config, shape)),
        cache=cache_avals(config, shape),
        x=Aval((shape.tokens, config.hidden_size), shape.dtype),
        batch=batch_avals(shape),
    )


KEYS_ASIDE = Orchestration("keys-aside", by_kind, streams=("keys", "side", "comm"))
ORCHESTRATIONS = {**{name: orchestrations.NAMED[name] for name in ANYWHERE}, KEYS_ASIDE.name: KEYS_ASIDE}
ONE, STACK = Setup(), Setup(layers=2)
SETUPS = {
    "layer": ONE,
    "model": STACK,
    "replicated query": Setup(replicate_query=True),
    "four ranks": Setup(ranks=4),
    "w8a8": Setup(layers=2, quantization="w8a8"),
}


def outputs(setup: Setup, program: Program, seed: int | None) -> list[torch.Tensor]:
    return next(runs(setup, program, [seed]))


def runs(setup: Setup, program: Program, seeds: Iterable[int | None]) -> Iterator[list[torch.Tensor]]:
    """Outputs under one seed after the other, of a program that is compiled once."""
    seeds = list(seeds)
    run = setup.compiled(backends.get("cpu", ranks=setup.ranks, adversary=seeds[0]), program, unchecked=True)
    return under(seeds, run, setup.arguments)


def under(
    seeds: Iterable[int | None], run: Executable, arguments: Callable[[], tuple[Any, ...]]
) -> Iterator[list[torch.Tensor]]:
    """Outputs under one seed after the other, of fresh arguments."""
    for seed in seeds:
        if isinstance(run.body, Adversary):
            assert seed is not None
            run.body.seed = seed
        yield pytree.tree_leaves(run(*arguments()))


def goes_wrong(setup: Setup, program: Program, expected: list[torch.Tensor]) -> bool:
    """Whether some seed gives other bits."""
    return any(not equal(found, expected) for found in runs(setup, program, range(300)))


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))  # NaN is not equal to itself


#: Each with each orchestration and each mode, under as many seeds as show any effect of theirs that is left out.
SOME = [
    (of, name, mode, 12 if of == "layer" else 7 if name == KEYS_ASIDE.name else 5)
    for of, name, mode in pairwise(of=[*SETUPS], name=[*ORCHESTRATIONS], mode=("minimal", "conservative"))[1]
]
#: And all three, under more.
ALL = itertools.product(SETUPS, ORCHESTRATIONS, ("minimal", "conservative"), [13])


@pytest.mark.parametrize(("of", "name", "mode", "seeds"), mostly_soak([*SOME, *ALL], SOME))
def test_every_seed_gives_the_serial_bits(of, name, mode, seeds):
    setup = SETUPS[of]
    expected = outputs(setup, schedule(setup.step, orchestrations.serial), None)
    assert not any(t.isnan().any() for t in expected)
    program = schedule(setup.step, ORCHESTRATIONS[name], mode=mode)
    check(program)
    for seed, found in enumerate(runs(setup, program, range(seeds))):
        assert equal(found, expected), f"seed {seed}"


def test_prediction_under_every_seed():
    """The prediction module beside the model: its experts, its exchange, its cache."""
    shape = evolve(STACK.shape, requests=2, tokens=3)
    step = mtp_step(model_config(2), shape, given=3, rows=2)
    loaders = [Loader(checkpoint=checkpoint(model_config(2)), rank=r, ranks=2, dtype=torch.float32) for r in range(2)]
    params = [loader.mtp(loader.model()) for loader in loaders]
    hidden = torch.randn(3, 24, generator=torch.Generator().manual_seed(5))

    def found(name: str, seeds: Iterable[int | None]) -> Iterator[list[torch.Tensor]]:
        seeds = list(seeds)
        backend = backends.get("cpu", ranks=2, adversary=seeds[0])
        run = backend.compile(schedule(step, ORCHESTRATIONS[name]), backend.prepare(step, params))
        rows = [torch.tensor([-1, 3, 18])] * 2, [hidden] * 2, [torch.tensor([2, 0, 0])] * 2
        return under(seeds, run, lambda: (ONE.caches(), *rows, ONE.batches(), [torch.tensor([0, 2])] * 2))

    (expected,) = found("serial", [None])
    assert not any(tensor.isnan().any() for tensor in expected)
    for name in ORCHESTRATIONS:
        for seed, results in enumerate(found(name, range(4))):
            assert equal(results, expected), f"{name}, seed {seed}"


@pytest.mark.parametrize(
    ("of", "name"),
    mostly_soak(
        itertools.product(["layer", "model"], ["exchange-aside", "attention-aside", "keys-aside"]),
        [("layer", "exchange-aside"), ("layer", "keys-aside"), ("model", "attention-aside")],
    ),
)
def test_nothing_can_be_left_out(of, name):
    nothing_can_be_left_out(SETUPS[of], schedule(SETUPS[of].step, ORCHESTRATIONS[name]))


def test_nothing_can_be_left_out_where_memory_is_kept():
    """Main goes on while the write reads the new rows, so these are kept, and their keeping is needed."""
    program = schedule(late_write(ONE), write_aside)
    rows = [launch.operands[1] for launch in program.launches if isinstance(launch.op, ops.WriteRows)]
    kept = [effect for effect in program.effects if isinstance(effect, Keep)]
    assert len(rows) == 2 and sorted(kept, key=str) == sorted([Keep(name, "keys") for name in rows], key=str)
    nothing_can_be_left_out(ONE, program)


def nothing_can_be_left_out(setup: Setup, program: Program) -> None:
    expected = outputs(setup, program, None)
    for index, effect in enumerate(program.effects):
        if isinstance(effect, Record | Wait | Keep):
            less = program.without(index)
            missing = [v for v in violations(less) if v.order]
            assert missing and all(" -> " in v.message for v in missing), effect
            assert goes_wrong(setup, less, expected), f"without '{effect}' no seed went wrong"


def test_a_workspace_without_its_order_is_torn():
    """With the event recorded one launch too early all data is in order, and only the scratch is not."""
    program = schedule(ONE.step, orchestrations.attention_aside)
    expected = outputs(ONE, program, None)
    effects = list(program.effects)
    at = effects.index(Record(MAIN, "e0"))
    assert isinstance(effects[at - 1].op, ops.HistoryAttention)
    effects[at - 1 : at + 1] = [effects[at], effects[at - 1]]
    early = evolve(program, effects=tuple(effects))
    assert [violation.rule for violation in violations(early)] == [2]
    assert goes_wrong(ONE, early, expected)


def test_caches_are_updated_in_place_under_any_interleaving():
    program = schedule(ONE.step, orchestrations.attention_aside)
    plain, hostile = ONE.arguments(), ONE.arguments()
    for arguments, seed in ((plain, None), (hostile, 5)):
        _, caches = ONE.compiled(backends.get("cpu", ranks=2, adversary=seed), program)(*arguments)
        for mine, given in zip(caches, arguments[0], strict=True):
            assert mine.latent is given.latent and mine.rope is given.rope
    before = ONE.caches()
    for rank in range(2):
        assert torch.equal(plain[0][rank].latent, hostile[0][rank].latent)
        assert not torch.equal(plain[0][rank].latent, before[rank].latent)
