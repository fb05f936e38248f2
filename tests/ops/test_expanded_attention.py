"""`ops.ExpandedAttention`: new queries over keys and values of every head, causal within a request."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from mla_fx.backends import Run, reference
from mla_fx.backends.common import expanded_attention
from mla_fx.effects import Aval, Group, InputError, ShapeError, ops
from mla_fx.effects.passes import definition
from tests.cases import each
from tests.ops.conftest import aval, exact, fields, on_cpu, strided

SCALE = 0.3
SENSE = {"scale": SCALE, "workspace": "mine"}
NONSENSE = {"scale": (0, -0.3, math.nan, math.inf, "1", None, True), "workspace": ("", "two words", None, 7)}
NOPE, ROPE, LATENT, VALUE = 5, 4, 6, 3
GROUP = Group("dcp", 3)
# query lengths, tokens
CASES = [((1,), 1), ((1, 1, 1), 3), ((1, 1, 0), 4), ((2, 1, 4), 8), ((0, 3, 3), 6), ((8,), 8), ((), 2), ((0, 0), 0)]


class New:
    """The operands of a step; padding tokens are NaN.  `asked` and `valued`: heads of the query and of `w_uv`."""

    def __init__(self, rules, rng, query, tokens, *, heads=2, asked=None, valued=None):
        self.heads, self.query = heads, query
        asked, valued = asked or heads, valued or heads
        self.parts = [rules.random(rng, tokens, asked * (NOPE + ROPE)), rules.random(rng, tokens, heads, ROPE)]
        self.parts += [rules.random(rng, tokens, LATENT), rules.random(rng, tokens, ROPE)]
        self.weights = [rules.random(rng, asked, NOPE, LATENT), rules.random(rng, valued, LATENT, VALUE)]
        for part in self.parts:
            part[sum(query) :] = math.nan

    def operands(self, layout=lambda t: t):
        return (*map(layout, self.parts), *map(layout, self.weights), self.query)

    def oracle(self, rank=0):
        return by_hand(*map(exact, (*self.parts, *self.weights)), self.query, scale=SCALE, rank=rank)


def by_hand(q, q_rope, latent, k_rope, w_uk, w_uv, query, *, scale, rank=0):
    """Keys and values one by one, for the heads of a rank."""
    (tokens, heads, rope), (every, nope, _) = q_rope.shape, w_uk.shape
    q = q.reshape(tokens, every, nope + rope)
    asked, valued = (range(rank * heads if len(w) > heads else 0, len(w))[:heads] for w in (w_uk, w_uv))
    cur, lse = np.zeros((tokens, heads, w_uv.shape[2])), np.full((tokens, heads), -math.inf)
    start = 0
    for new in query:
        for t in range(start, start + new):
            for n, (first, second) in enumerate(zip(asked, valued, strict=True)):
                keys = np.stack([w_uk[first] @ latent[j] for j in range(start, t + 1)])
                s = scale * (keys @ q[t, first, :nope] + k_rope[start : t + 1] @ q_rope[t, n])
                lse[t, n] = np.logaddexp.reduce(s)
                cur[t, n] = np.exp(s - lse[t, n]) @ (latent[start : t + 1] @ w_uv[second])
        start += new
    return cur, lse


def run(rules, new, layout=lambda t: t, *, group=None, rank=0):
    cur, lse = rules(ops.ExpandedAttention(SCALE, group), *new.operands(layout), rank=rank)
    want, want_lse = new.oracle(rank)
    rules.close(cur, want)
    rules.close(lse, want_lse)


@each("case", CASES)
@each("heads", [1, 3])
def test_expanded_attention(rules, rng, case, heads):
    run(rules, New(rules, rng, *case, heads=heads))


@each("case", CASES)
def test_strided_operands(rules, rng, case):
    run(rules, New(rules, rng, *case), strided)


@each("rank", [0, 1, 2])
@each(("asked", "valued"), [(6, 6), (2, 6), (6, 2)])
def test_own_heads_of_all(rules, rng, rank, asked, valued):
    """Of each weight, whichever is of all heads, the rank takes its own."""
    run(rules, New(rules, rng, (2, 3), 6, asked=asked, valued=valued), group=GROUP, rank=rank)


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(query=st.lists(st.integers(0, 9), max_size=4), padding=st.integers(0, 2), tile=st.sampled_from([1, 4, 128]))
def test_any_lengths(rules, monkeypatch, query, padding, tile):
    monkeypatch.setattr(expanded_attention, "TILE", tile)
    rng = np.random.default_rng(sum(query))
    run(rules, New(rules, rng, tuple(query), sum(query) + padding))


def test_more_than_a_tile_as_it_is(rng):
    rules = on_cpu(torch.float32)
    run(rules, New(rules, rng, (2, 300, 1), 304, heads=1))


def test_nan_of_a_request_stays_there(rules, rng):
    new = New(rules, rng, (2, 2), 4)
    new.parts[3][0] = math.nan
    cur, lse = rules(ops.ExpandedAttention(SCALE), *new.operands())
    assert lse[:2].isnan().all()
    assert cur[2:].isfinite().all() and lse[2:].isfinite().all()


@pytest.mark.parametrize(("asked", "valued"), [(2, 2), (6, 6), (2, 6), (6, 2)])
def test_by_its_parts(rng, asked, valued):
    """The definition, part by part as the reference has them, is the formula."""
    new = New(on_cpu(torch.float64), rng, (2, 0, 3), 6, asked=asked, valued=valued)
    op, rank = ops.ExpandedAttention(SCALE, GROUP, "mine"), 2
    step = definition(op, [aval(operand) for operand in new.operands()])
    values = dict(zip((put.name for put in step.inputs), new.operands(), strict=True))
    for part in step.equations:
        rule = reference.TABLE.rules[type(part.op)]
        found = rule(*(values[name] for name in part.operands), run=Run(rank), **fields(part.op))
        values.update(zip(part.results, found, strict=True))
    assert [type(part.op) for part in step.equations if isinstance(part.op, ops.LocalHeads)] == [ops.LocalHeads] * (
        asked == 6
    )
    for name, want in zip(step.outputs, new.oracle(rank), strict=True):
        np.testing.assert_allclose(exact(values[name]), want, rtol=1e-12, atol=1e-12)


def test_multiply_adds_are_a_third():
    """At DeepSeek-V3's sizes, as torch counts them: what the formula says, and of the latent form 0.32 at 8192."""
    for tokens, share in ((2048, 0.41), (8192, 0.33)):
        sizes = [(tokens, 2 * 192), (tokens, 2, 64), (tokens, 512), (tokens, 64), (2, 128, 512), (2, 512, 128)]
        operands = [torch.empty(size, dtype=torch.bfloat16, device="meta") for size in sizes]
        with FlopCounterMode(display=False) as counter:
            expanded_attention.rule(*operands, (tokens,), run=Run(0), scale=SCALE, group=None, workspace="")
        tile = expanded_attention.TILE
        pairs = sum(tile * (first + tile) for first in range(0, tokens, tile))
        assert counter.get_total_flops() == 2 * 2 * (pairs * (128 + 64 + 128) + tokens * 512 * (128 + 128))
        latent = tokens * (tokens + 1) // 2 * (512 + 64 + 512) + tokens * 512 * 128
        assert counter.get_total_flops() / (2 * 2 * latent) == pytest.approx(share, abs=0.01)


def avals(**changed):
    given = {
        "q": Aval((4, 16 * 192), "bf16"),
        "q_rope": Aval((4, 16, 64), "bf16"),
        "latent": Aval((4, 512), "bf16"),
        "k_rope": Aval((4, 64), "bf16"),
        "w_uk": Aval((16, 128, 512), "bf16"),
        "w_uv": Aval((16, 512, 100), "bf16"),
        "query_lengths": Aval((2,), "int64"),
    }
    return given | changed


def test_shapes():
    op = ops.ExpandedAttention(SCALE)
    assert tuple(avals()) == tuple(op.operands)
    for dtype, lse in (("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "fp32"), ("fp64", "fp64")):
        given = [one.with_float(dtype) for one in avals().values()]
        assert op.infer(*given) == (Aval((4, 16, 100), dtype), Aval((4, 16), lse))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": Aval((4, 16 * 128), "bf16")}, r"axis 1 of q must be M \* \(P \+ R\) = 16 \* 192 = 3072: got 2048"),
        ({"w_uk": Aval((48, 128, 512), "bf16")}, r"axis 1 of q must be M \* \(P \+ R\) = 48 \* 192 = 9216: got 3072"),
        ({"w_uk": Aval((8, 128, 512), "bf16")}, r"axis M of w_uk must be 16, .* q_rope or 48, .* of dcp\[3\]: got 8"),
        ({"w_uv": Aval((32, 512, 9), "bf16")}, r"axis H of w_uv must be 16, .* q_rope or 48, .* of dcp\[3\]: got 32"),
        ({"latent": Aval((4, 64), "bf16")}, r"axis L .* 64 in latent, 512 in w_uk"),
        ({"k_rope": Aval((3, 64), "bf16")}, r"axis T .* 4 in q, 3 in k_rope"),
        ({"w_uv": Aval((16, 512, 9), "fp32")}, r"w_uv must have the dtype of q, bf16: got fp32"),
    ],
)
def test_shapes_that_are_refused(changed, message):
    with pytest.raises(ShapeError, match="expanded_attention: " + message):
        ops.ExpandedAttention(SCALE, GROUP).infer(*avals(**changed).values())


def test_without_a_group_there_are_own_heads_only():
    with pytest.raises(ShapeError, match=r"axis H of w_uv must be 16, for the heads of q_rope: got 48"):
        ops.ExpandedAttention(SCALE).infer(*avals(w_uv=Aval((48, 512, 9), "bf16")).values())


def test_values():
    op = ops.ExpandedAttention(SCALE)
    for lengths in ((4, 0), (0, 0), (1, 2)):
        op.value_rule(avals(), {"query_lengths": lengths})
    with pytest.raises(InputError, match=r"query_lengths: the sum must be at most T = 4 tokens: got 5, from \(4, 1\)"):
        op.value_rule(avals(), {"query_lengths": (4, 1)})
