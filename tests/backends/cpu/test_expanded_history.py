"""The history of prompts with a key and a value of every head: found where all heads are here, right, and chosen by
counted operations."""

import math

import numpy as np
import pytest
import torch
from attrs import evolve

from mla_fx import MlaConfig, StepShape, attention_step, backends, orchestrations
from mla_fx.backends import Run
from mla_fx.backends.cpu import expanded_attention
from mla_fx.backends.cpu.fused import expanded_history
from mla_fx.backends.cpu.fused.expanded_history import ExpandedHistory, multiply_adds
from mla_fx.effects import Aval, InputError, ShapeError, ops, schedule
from mla_fx.effects.cost import multiply_adds as counted
from mla_fx.passes import expanding_saves
from tests.setups import Setup

HEADS, NOPE, ROPE, LATENT, VALUE, SIZE = 3, 5, 4, 6, 3, 4
MERGED = {"project_before_merge": True, "expand_current": True}
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7}


def operands(rng, dtype, query, history, tokens):
    def drawn(*shape):
        return torch.from_numpy(rng.standard_normal(shape)).to(dtype)

    columns = max(1, -(-max(history) // SIZE))
    blocks = len(query) * columns
    table = torch.from_numpy(rng.permutation(blocks).reshape(len(query), columns).astype(np.int32))
    caches = drawn(blocks, SIZE, LATENT), drawn(blocks, SIZE, ROPE)
    weights = drawn(HEADS, NOPE, LATENT), drawn(HEADS, LATENT, VALUE)
    return (drawn(tokens, HEADS * (NOPE + ROPE)), drawn(tokens, HEADS, ROPE), *caches, table, query, history, *weights)


def by_hand(q, q_rope, latents, ropes, table, query, history, w_uk, w_uv, scale):
    """One query, head and key after the other."""
    q, q_rope, latents, ropes, w_uk, w_uv = (x.double().numpy() for x in (q, q_rope, latents, ropes, w_uk, w_uv))
    hist, lse = np.zeros((len(q), HEADS, VALUE)), np.full((len(q), HEADS), -math.inf)
    t = 0
    for b, new in enumerate(query):
        rows = [(int(table[b, j // SIZE]), j % SIZE) for j in range(history[b])]
        for new_token in range(new):
            at = t + new_token
            for n in range(HEADS) if rows else ():
                own = q[at].reshape(HEADS, NOPE + ROPE)[n, :NOPE]
                s = np.array([scale * (own @ (w_uk[n] @ latents[r]) + q_rope[at, n] @ ropes[r]) for r in rows])
                lse[at, n] = np.logaddexp.reduce(s)
                hist[at, n] = sum(np.exp(s[j] - lse[at, n]) * (latents[r] @ w_uv[n]) for j, r in enumerate(rows))
        t += new
    return hist, lse


CASES = [((40, 1, 30), (9, 30, 0)), ((1,), (5,)), ((2, 0, 70), (13, 8, 22)), ((50,), (1,)), ((0, 0), (3, 0))]


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("keys", [4, 1024])
def test_rule(monkeypatch, dtype, keys):
    """Requests in either form, one beside the other, and padding; keys in one tile and in several."""
    monkeypatch.setattr(expanded_history, "KEYS", keys)
    rng = np.random.default_rng(0)
    for query, history in CASES:
        given = operands(rng, dtype, query, history, sum(query) + 2)
        hist, lse = expanded_history.rule(*given, run=Run(), scale=0.3, workspace="mine")
        want, want_lse = by_hand(*given, 0.3)
        assert hist.dtype == dtype and lse.dtype == torch.promote_types(dtype, torch.float32)
        np.testing.assert_allclose(hist.double(), want, rtol=CLOSE[dtype], atol=3 * CLOSE[dtype])
        if dtype != torch.bfloat16:
            np.testing.assert_allclose(lse.double(), want_lse, rtol=CLOSE[dtype], atol=CLOSE[dtype])


def test_each_request_takes_what_is_less(monkeypatch):
    """Of three requests the long ones are expanded, whatever stands beside them."""
    seen = []
    attend = expanded_history.attend
    monkeypatch.setattr(expanded_history, "attend", lambda q, *a, **k: seen.append(len(q)) or attend(q, *a, **k))
    query, history = (40, 1, 30, 2), (9, 30, 6, 30)
    given = operands(np.random.default_rng(0), torch.float32, query, history, sum(query))
    expanded_history.rule(*given, run=Run(), scale=0.3, workspace="mine")
    sizes = LATENT, NOPE, ROPE, VALUE
    less = [
        n
        for n, m in zip(query, history, strict=True)
        if multiply_adds(n, m, *sizes)[1] < multiply_adds(n, m, *sizes)[0]
    ]
    assert seen == less == [40, 30]


@pytest.mark.parametrize("form", [{}, {"replicate_query": True}], ids=str)
@pytest.mark.parametrize("layers", [None, 2])
@pytest.mark.parametrize("ranks", [1, 4])
def test_where_it_is_found_it_gives_what_the_step_gave(ranks, layers, form):
    setup = Setup(ranks=ranks, layers=layers, tokens=24, table_width=13, **MERGED, **form)
    cpu_, exact = backends.get("cpu", ranks=ranks), backends.get("reference", ranks=ranks)
    step = cpu_.lower(setup.step)
    found = [e for e in step.equations if isinstance(e.op, ExpandedHistory)]
    here = ranks == 1 or bool(form)
    assert len(found) == here * (layers or 1)
    if here:
        assert not {ops.HistoryAttention, ops.AbsorbQuery} & {type(e.op) for e in step.equations}
    arguments = setup.caches(), setup.hidden(), setup.batches((30, 9), (20, 3))
    wanted = setup.compiled(exact, schedule(setup.step, orchestrations.serial))(*exact.put(arguments, copy=True))
    for backend in (cpu_, exact, backends.get("cpu", ranks=ranks, adversary=1)):
        got = setup.compiled(backend, schedule(step, orchestrations.attention_aside))(
            *backend.put(arguments, copy=True)
        )
        for ours, right in zip(got[0], wanted[0], strict=True):
            torch.testing.assert_close(ours.double(), right, rtol=1e-4, atol=1e-4)


def test_steps_that_decode_are_left_alone():
    for setup in (Setup(ranks=1), Setup(ranks=1, project_before_merge=True), Setup(ranks=2, **MERGED)):
        assert not any(isinstance(e.op, ExpandedHistory) for e in backends.get("cpu").lower(setup.step).equations)


def test_counted_operations_are_those_of_the_less():
    """At DeepSeek-V3's sizes, of a chunk of 512 behind 8192 keys, and of a token behind them."""
    config = MlaConfig.deepseek_v3()
    shape = StepShape(tokens=512, requests=1, blocks=80, block_size=128, table_width=80, **MERGED)
    step = backends.get("cpu").lower(attention_step(config, shape))
    (history,) = [equation for equation in step.equations if isinstance(equation.op, ExpandedHistory)]
    axes = {"H": 128, "L": 512, "P": 128, "R": 64, "V": 128, "T": 512}
    lengths = {"query_lengths": (512, 1), "history_lengths": (8192, 8192)}
    assert history.op.work(axes, lengths) == 128 * (8192 * 512 * 256 + 512 * 8192 * 320 + 512 * 256 + 8192 * 1088)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 2e-6), (torch.float64, 1e-13)], ids=str)
def test_tiles_of_queries_against_all_scores_at_once(dtype, close):
    """Sizes that the compiled products take, keys that fill no panel, more queries than a tile has."""
    made = torch.Generator().manual_seed(0)
    for n, m, causal in ((300, 300, True), (129, 70, False), (1, 33, False), (16, 16, True)):
        q, latent, k_rope, up_k, up_v = (
            torch.randn(size, generator=made, dtype=torch.float64)
            for size in ((n, 3, 32), (m, 48), (m, 8), (3, 24, 48), (3, 48, 32))
        )
        keys = torch.einsum("ml,npl->nmp", latent, up_k), k_rope.expand(3, -1, -1)
        scores = 0.1 * torch.einsum("tnf,nmf->tnm", q, torch.cat(keys, 2))
        if causal:
            scores += torch.full((n, m), -math.inf).triu(1).unsqueeze(1)
        want = torch.einsum("tnm,ml,nlv->tnv", scores.softmax(2), latent, up_v)
        own = (one.to(dtype) for one in (latent, k_rope, up_k, up_v))
        out, lse = expanded_attention.attend(q.to(dtype), expanded_attention.expanded(*own), scale=0.1, causal=causal)
        assert (out - want).abs().max() <= close * want.abs().max()
        assert (lse - scores.logsumexp(2)).abs().max() <= close * scores.abs().nan_to_num(0, posinf=0).max()


def test_what_is_not_finite_is_seen():
    """A query that is no number gives none, and the others what they gave."""
    for n, m in ((1, 1), (3, 3), (2, 5), (40, 40)):
        for causal in (True, False) if n == m else (False,):
            q, latent, k_rope = torch.randn(n, 2, 9), torch.randn(m, 6), torch.randn(m, 4)
            keys = expanded_attention.expanded(latent, k_rope, torch.randn(2, 5, 6), torch.randn(2, 6, 3))
            q[0] = math.nan
            out, lse = expanded_attention.attend(q, keys, scale=0.3, causal=causal)
            assert out[0].isnan().all() and lse[0].isnan().all()
            assert out[1:].isfinite().all() and lse[1:].isfinite().all()


def test_what_is_refused():
    op = ExpandedHistory(0.3)
    given = operands(np.random.default_rng(0), torch.float32, (2,), (5,), 2)
    avals = [
        Aval((len(x),), "int64")
        if isinstance(x, tuple)
        else Aval(tuple(x.shape), str(x.dtype)[6:].replace("float", "fp"))
        for x in given
    ]
    with pytest.raises(ShapeError, match=r"axis 1 of q must be H \* \(P \+ R\) = 27: got 28"):
        op.infer(Aval((2, 28), "fp32"), *avals[1:])
    named = dict(zip(op.operands, avals, strict=True))
    values = {"block_table": given[4].numpy(), "query_lengths": (2,), "history_lengths": (99,)}
    with pytest.raises(InputError, match="history_lengths: each must be in"):
        op.value_rule(named, values)
    with pytest.raises(InputError, match="scale"):
        evolve(op, scale=0)


@pytest.mark.parametrize("merged", [{}, {"project_before_merge": True}], ids=["plain", "merged"])
@pytest.mark.parametrize(
    ("query", "history"),
    [((64, 64), (0, 0)), ((64, 64), (0, 64)), ((64,), (8192,)), ((1,), (5,)), ((300, 1), (64, 900)), ((600,), (30,))],
)
def test_the_rule_of_the_prompts_is_the_difference_of_the_lowered_steps(query, history, merged):
    """With DeepSeek-V3's head; of requests without a history the expanded form is less however short they are."""
    config, tokens = MlaConfig.deepseek_v3(), sum(query)
    shape = StepShape(tokens=tokens, requests=len(query), blocks=8, block_size=4, table_width=8, **merged)
    lengths = {"batch.query_lengths": query, "batch.history_lengths": history}
    work = []
    for one in (shape, evolve(shape, **MERGED)):
        step = backends.get("cpu").lower(attention_step(config, one))
        work.append(counted(step.inputs, step.equations, lengths))
    saved = expanding_saves(config, query, plain=not merged, behind=history)
    assert (work[0] - work[1]) == saved * config.num_attention_heads
    assert saved > 0 or any(history)
