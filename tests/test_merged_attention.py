"""History and current part, exchanged and merged, equal dense causal attention over the whole sequence.

For any ranks, interleave, lengths, new tokens, heads, dtype and orchestration;
in float64 to 1e-12 (`reference`), in a native dtype within twice the error of
one unsharded pass (`cpu`).  Cache rows and table entries behind the lengths
are poisoned.
"""

import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mla_fx import (
    Layout,
    all_to_all,
    backends,
    combine,
    current_attention,
    gather_heads,
    history_attention,
    orchestrations,
)
from mla_fx.decode import batch_avals
from mla_fx.effects import Aval, Program, Step, ops, schedule, trace
from mla_fx.parameters import Cache
from tests.cases import mostly_soak
from tests.oracles import dense_causal, single_pass
from tests.sequences import Case, Sequences, fill
from tests.setups import ANYWHERE

SCALE = 0.3


def merge_step(case: Case) -> Step:
    """Everything between the query projection and V-up."""
    shape = case.shape
    rows, queries = (shape.blocks, shape.block_size), (shape.tokens, case.heads)
    shapes = {
        "q_latent": Aval((*queries, case.latent), case.dtype),
        "q_rope": Aval((*queries, case.rope), case.dtype),
        "cache": Cache(Aval((*rows, case.latent), case.dtype), Aval((*rows, case.rope), case.dtype)),
        "latent": Aval((shape.tokens, case.latent), case.dtype),
        "k_rope": Aval((shape.tokens, case.rope), case.dtype),
        "batch": batch_avals(shape),
    }

    def merge(q_latent, q_rope, cache, latent, k_rope, batch):
        every = gather_heads(q_latent, q_rope, group=shape.dcp)
        lengths = (batch.query_lengths, batch.history_lengths)
        hist, hist_lse = history_attention(*every, cache, batch.block_table, *lengths, scale=SCALE)
        cur, cur_lse = current_attention(q_latent, q_rope, latent, k_rope, batch.query_lengths, scale=SCALE)
        return combine(*all_to_all(hist, hist_lse, group=shape.dcp), cur, cur_lse)

    return trace(merge, **shapes)


def merged(backend: backends.Backend, program: Program, data: Sequences) -> torch.Tensor:
    """The result of all ranks, [T, H, L]."""
    ranks = data.case.ranks
    arguments = (
        data.per_rank(data.q_latent),
        data.per_rank(data.q_rope),
        data.caches,
        [data.new(data.latents)] * ranks,
        [data.new(data.ropes)] * ranks,
        data.batches,
    )
    return torch.cat(backend.compile(program)(*backend.put(arguments)), dim=1)


def whole(data: Sequences, attend, dtype: torch.dtype) -> torch.Tensor:
    """`attend` request by request over whole sequences; padding tokens give 0."""
    q_latent, q_rope = data.q_latent.to(dtype), data.q_rope.to(dtype)
    out, start = torch.zeros_like(q_latent), 0
    for b, new in enumerate(data.case.query):
        own = slice(start, start + new)
        if new:
            out[own] = attend(q_latent[own], q_rope[own], data.latents[b].to(dtype), data.ropes[b].to(dtype), SCALE)
        start += new
    return out


def largest_lse(data: Sequences) -> float:
    """How large an LSE can be: the largest score of a new token with a key of its request, and the log of all keys."""
    largest, start = 0.0, 0
    for b, new in enumerate(data.case.query):
        own = slice(start, start + new)
        pairs = ((data.q_latent[own], data.latents[b]), (data.q_rope[own], data.ropes[b]))
        if new:
            largest = max(largest, float(sum(SCALE * q.double() @ k.double().T for q, k in pairs).abs().max()))
        start += new
    keys = max((h + q for h, q in zip(data.case.history, data.case.query, strict=True)), default=1)
    return largest + math.log(max(keys, 1))


def verify(case: Case, orchestration: str, seed: int | None = None) -> None:
    data = fill(case)
    program = schedule(merge_step(case), orchestrations.NAMED[orchestration])
    exact = whole(data, dense_causal, torch.float64)

    reference = merged(backends.get("reference", ranks=case.layout, adversary=seed), program, data)
    torch.testing.assert_close(reference, exact, rtol=1e-12, atol=1e-12)

    hold(merged(backends.get("cpu", ranks=case.layout, adversary=seed), program, data), data, exact)


def hold(result: torch.Tensor, data: Sequences, exact: torch.Tensor) -> None:
    """The result in a native dtype is as near the truth as one unsharded pass, and padding is 0."""
    case = data.case
    assert result.dtype == data.q_latent.dtype
    if case.dtype == "fp64":  # the oracle's own dtype: there is nothing more exact to measure an error against
        torch.testing.assert_close(result, exact, rtol=1e-12, atol=1e-12)
    else:
        one_pass = whole(data, single_pass, data.q_latent.dtype)
        error, allowed = (result.double() - exact).norm(), (one_pass.double() - exact).norm()
        # One pass over a few keys can be exact by luck.  Always allowed for: half a rounding of the result, and half
        # a rounding of the float32 LSE, which between shards turns into a relative error of their weights.
        rounding = torch.finfo(result.dtype).eps + torch.finfo(torch.float32).eps * (1 + largest_lse(data))
        floor = exact.norm() * rounding / 4
        assert error <= 2 * max(allowed, floor), f"error {error:.3g}, one pass {allowed:.3g}"
    padding = result[sum(case.query) :]
    assert torch.equal(padding, torch.zeros_like(padding))


#: Context groups inside a replica, each with the whole cache.
CONTEXTS = (Layout(tp=4, dcp=2), Layout(tp=4, dcp=1), Layout(tp=8, dcp=4), Layout(tp=8, dcp=2))

lengths = st.one_of(
    st.just(0), st.integers(1, 9), st.sampled_from([127, 128, 129, 255, 256, 257]), st.integers(10, 400)
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    interleave = draw(st.sampled_from([1, 2, 4, 128]))
    requests = draw(st.integers(1, 4))
    return Case(
        history=tuple(draw(lengths) for _ in range(requests)),
        query=tuple(draw(st.integers(0, 8)) for _ in range(requests)),
        ranks=draw(st.sampled_from([1, 2, 4, 8, *CONTEXTS])),
        interleave=interleave,
        block_size=interleave * draw(st.integers(1, 3)) if interleave < 128 else 128,
        heads=draw(st.sampled_from([1, 2, 3, 16])),
        dtype=draw(st.sampled_from(["bf16", "fp16", "fp32", "fp64"])),
        padding=draw(st.integers(0, 2)),
        sharpness=draw(st.sampled_from([0.0, 1e-30, 1.0, 4.0])),
        seed=draw(st.integers(0, 10**6)),
    )


@settings(deadline=None, max_examples=30, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases(), st.sampled_from(ANYWHERE), st.one_of(st.none(), st.integers(0, 10**6)))
def test_any_split_is_the_whole(case, orchestration, seed):
    verify(case, orchestration, seed)


@pytest.mark.soak
@settings(deadline=None, max_examples=5000, suppress_health_check=list(HealthCheck))
@given(cases(), st.sampled_from(ANYWHERE), st.one_of(st.none(), st.integers(0, 10**6)))
def test_any_of_many_splits_is_the_whole(case, orchestration, seed):
    verify(case, orchestration, seed)


@pytest.mark.parametrize("orchestration", ANYWHERE)
@pytest.mark.parametrize(
    ("total", "new", "ranks", "interleave"),
    [(9, 2, 2, 4), (5, 1, 4, 4), (130, 4, 2, 128), (17, 3, 8, 1), (3, 3, 4, 1), (17, 3, Layout(tp=4, dcp=2), 1)],
)
def test_splits_of_the_contract(total, new, ranks, interleave, orchestration):
    """The minimal oracle of the written contract for this split: total, new, ranks, interleave."""
    verify(Case((total - new,), (new,), ranks, interleave, max(interleave, 4)), orchestration)


@pytest.mark.parametrize(
    ("dtype", "ranks"),
    mostly_soak(itertools.product(["bf16", "fp16", "fp32"], [1, 8]), [("bf16", 8), ("fp16", 1), ("fp32", 8)]),
)
def test_real_sizes_and_thousands_of_tokens(dtype, ranks):
    verify(
        Case(
            history=(3000, 0, 1, 128),
            query=(1, 8, 1, 3),
            ranks=ranks,
            interleave=128,
            block_size=128,
            heads=16,
            latent=512,
            rope=64,
            dtype=dtype,
            sharpness=0.1,
        ),
        "attention-aside",
    )


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_partials_of_empty_shards_may_hold_anything(name):
    """Four ranks, of which three have no history: what they send beside an LSE of -inf is NaN, and does not arrive."""
    case = Case(history=(3, 0), query=(2, 1), ranks=4, interleave=4, dtype="fp64")
    data = fill(case)
    plain = backends.get(name, ranks=4)
    poisoned = 0

    def history(*operands, run, **how):
        nonlocal poisoned
        out, lse = plain.table.rules[ops.HistoryAttention](*operands, run=run, **how)
        out[lse == -torch.inf] = torch.nan
        poisoned += int(out.isnan().any())
        return out, lse

    program = schedule(merge_step(case), orchestrations.attention_aside)
    found = merged(plain.with_rules({ops.HistoryAttention: history}), program, data)
    assert poisoned == 4  # the rank with history too: the second request has none anywhere
    torch.testing.assert_close(found, whole(data, dense_causal, torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64"])
def test_lse_beyond_the_range_of_float16(dtype):
    """Scores of about 1e5: an LSE squeezed through a 16-bit number would overflow or lose its low digits."""
    case = Case(history=(40, 7), query=(2, 1), ranks=4, dtype=dtype, sharpness=4e4, seed=3)
    data = fill(case)
    scores = SCALE * torch.einsum("thl,sl->ths", data.q_latent.double(), data.latents[0].double())
    assert scores.abs().max() > 65504
    verify(case, "attention-aside")
