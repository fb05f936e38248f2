"""`ops.CurrentAttention`: new queries over the step's own keys, causal within a request."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mla_fx.backends.common import current_attention
from mla_fx.backends.device import Device, Run
from mla_fx.effects import Aval, InputError, ShapeError, ops
from tests.cases import each
from tests.ops.conftest import exact, on_cpu, strided
from tests.oracles import attend

SCALE = 0.3
SENSE = {"scale": SCALE, "workspace": "mine"}
NONSENSE = {"scale": (0, -0.3, math.nan, math.inf, "1", None, True), "workspace": ("", "two words", None, 7)}
# query lengths, tokens
CASES = [((1,), 1), ((1, 1, 1), 3), ((1, 1, 0), 4), ((2, 1, 4), 8), ((0, 3, 3), 6), ((8,), 8), ((), 2), ((0, 0), 0)]


class New:
    """The operands of a step; padding tokens are NaN."""

    def __init__(self, rules, rng, query, tokens, heads=3):
        self.parts = [rules.random(rng, tokens, heads, 6), rules.random(rng, tokens, heads, 4)]
        self.parts += [rules.random(rng, tokens, 6), rules.random(rng, tokens, 4)]
        self.query = query
        for part in self.parts:
            part[sum(query) :] = math.nan

    def oracle(self):
        q_latent, q_rope, latent, k_rope = map(exact, self.parts)
        cur, lse = np.zeros(q_latent.shape), np.full(q_latent.shape[:2], -math.inf)
        start = 0
        for new in self.query:
            for t in range(start, start + new):
                keys = [(latent[j], k_rope[j]) for j in range(start, t + 1)]
                for n in range(cur.shape[1]):
                    cur[t, n], lse[t, n] = attend(q_latent[t, n], q_rope[t, n], keys, SCALE)
            start += new
        return cur, lse


def run(rules, new, layout=lambda t: t):
    cur, lse = rules(ops.CurrentAttention(SCALE), *map(layout, new.parts), new.query)
    want, want_lse = new.oracle()
    rules.close(cur, want)
    rules.close(lse, want_lse)


@each("case", CASES)
@each("heads", [1, 3])
def test_current_attention(rules, rng, case, heads):
    run(rules, New(rules, rng, *case, heads=heads))


@each("case", CASES)
def test_strided_operands(rules, rng, case):
    run(rules, New(rules, rng, *case), strided)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(query=st.lists(st.integers(0, 5), max_size=6), padding=st.integers(0, 2), at_a_time=st.sampled_from([1, 4, 64]))
def test_any_lengths(rules, monkeypatch, query, padding, at_a_time):
    monkeypatch.setattr(current_attention, "HOST_TOKENS", at_a_time)
    rng = np.random.default_rng(sum(query))
    run(rules, New(rules, rng, tuple(query), sum(query) + padding, heads=2))


@pytest.mark.parametrize(("module", "products"), [(None, 4), (object(), 1)], ids=["host", "device"])
def test_tokens_at_a_time(monkeypatch, rng, module, products):
    """On a device more than on the host, where they are to stay in its caches."""
    monkeypatch.setattr(current_attention, "HOST_TOKENS", 2)
    monkeypatch.setattr(current_attention, "TOKENS", 8)
    called, multiply = [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *operands: called.append(operands) or multiply(*operands))
    new = New(on_cpu(torch.float32), rng, (1,) * 8, 8)
    cur, lse = current_attention.rule(
        *new.parts, new.query, run=Run(0, Device("cpu", module)), scale=SCALE, workspace=""
    )
    want, want_lse = new.oracle()
    np.testing.assert_allclose(exact(cur), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(exact(lse), want_lse, rtol=1e-5, atol=1e-5)
    assert len(called) == products


def test_one_key_is_passed_on_bit_for_bit(rules, rng):
    new = New(rules, rng, (1, 1), 2)
    new.parts[0] *= 1e4  # softmax over one key is 1, however large the score
    cur, lse = rules(ops.CurrentAttention(SCALE), *new.parts, new.query)
    assert torch.equal(cur, new.parts[2].unsqueeze(1).expand_as(cur))
    np.testing.assert_allclose(lse.numpy(), new.oracle()[1], rtol=1e-12 if rules.wide == torch.float64 else 2e-6)


def test_nan_of_a_request_stays_there(rules, rng):
    new = New(rules, rng, (2, 2), 4)
    new.parts[3][0] = math.nan
    cur, lse = rules(ops.CurrentAttention(SCALE), *new.parts, new.query)
    assert lse[:2].isnan().all()
    assert cur[2:].isfinite().all() and lse[2:].isfinite().all()


def avals(**changed):
    given = {
        "q_latent": Aval((4, 16, 512), "bf16"),
        "q_rope": Aval((4, 16, 64), "bf16"),
        "latent": Aval((4, 512), "bf16"),
        "k_rope": Aval((4, 64), "bf16"),
        "query_lengths": Aval((2,), "int64"),
    }
    return given | changed


def test_shapes():
    op = ops.CurrentAttention(SCALE)
    assert tuple(avals()) == tuple(op.operands)
    for dtype, lse in (("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "fp32"), ("fp64", "fp64")):
        given = [aval.with_float(dtype) for aval in avals().values()]
        assert op.infer(*given) == (Aval((4, 16, 512), dtype), Aval((4, 16), lse))


@pytest.mark.parametrize(
    ("operand", "aval", "message"),
    [
        ("q_rope", Aval((4, 8, 64), "bf16"), r"axis N .* 16 in q_latent, 8 in q_rope"),
        ("latent", Aval((3, 512), "bf16"), r"axis T .* 4 in q_latent, 3 in latent"),
        ("latent", Aval((4, 64), "bf16"), r"axis L .* 512 in q_latent, 64 in latent"),
        ("k_rope", Aval((4, 32), "bf16"), r"axis R .* 64 in q_rope, 32 in k_rope"),
        ("k_rope", Aval((4, 64), "fp32"), r"k_rope must have the dtype of q_latent, bf16: got fp32"),
        ("query_lengths", Aval((2,), "int32"), r"query_lengths must be int64: got int32"),
    ],
)
def test_shapes_that_are_refused(operand, aval, message):
    with pytest.raises(ShapeError, match="current_attention: " + message):
        ops.CurrentAttention(SCALE).infer(*avals(**{operand: aval}).values())


def test_values():
    op = ops.CurrentAttention(SCALE)
    for lengths in ((4, 0), (0, 0), (1, 2)):
        op.value_rule(avals(), {"query_lengths": lengths})
    with pytest.raises(InputError, match=r"query_lengths: the sum must be at most T = 4 tokens: got 5, from \(4, 1\)"):
        op.value_rule(avals(), {"query_lengths": (4, 1)})
    with pytest.raises(InputError, match=r"query_lengths: each must be at least 0: got \(2, -1\)"):
        op.value_rule(avals(), {"query_lengths": (2, -1)})
