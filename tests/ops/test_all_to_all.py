"""`ops.AllToAll`: partials by heads, the LSE bit for bit beside them."""

import math

import numpy as np
import pytest
import torch

from mla_fx.dtypes import DTYPES
from mla_fx.effects import Aval, Group, ShapeError, ops
from tests.cases import each
from tests.ops.conftest import bits, on_cpu, strided


def verify(rules, given, ranks, layout=torch.clone):
    results = rules.group(ops.AllToAll(Group("dcp", ranks)), [(layout(out), layout(lse)) for out, lse in given])
    tokens, heads, _ = given[0][0].shape
    own = heads // ranks
    for r, (recv, recv_lse) in enumerate(results):
        for s, (out, lse) in enumerate(given):
            for t in range(tokens):
                for n in range(own):
                    assert torch.equal(bits(recv[s, t, n]), bits(out[t, r * own + n]))
                    assert torch.equal(bits(recv_lse)[s, t, n], bits(lse)[t, r * own + n])


@each(("ranks", "own", "tokens"), [(1, 2, 3), (2, 2, 2), (4, 1, 1), (2, 3, 0), (3, 2, 5)])
@each("latent", [1, 5, 8])
@each("layout", [torch.clone, strided])
def test_every_row_arrives(rules, rng, ranks, own, tokens, latent, layout):
    shape = (tokens, ranks * own)
    given = [(rules.random(rng, *shape, latent), rules.random(rng, *shape, dtype=rules.wide)) for _ in range(ranks)]
    verify(rules, given, ranks, layout)


NASTY = [65504.0, 65536.25, -7e4, 70000.25, 3e38, 1e-30, -1e-45, 0.0, -0.0, math.inf, -math.inf, math.nan]


def test_lse_of_any_size_crosses_bit_for_bit(rules):
    lse = torch.tensor(NASTY, dtype=rules.wide).view(3, 4)
    verify(rules, [(rules.tensor(np.zeros((3, 4, 2))), lse), (rules.tensor(np.ones((3, 4, 2))), lse.flip(0))], 2)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
def test_any_bit_pattern_crosses(rng, dtype):
    """Quiet and signalling NaN with payloads, subnormals: whatever the bits, in the output as in the LSE."""
    rules = on_cpu(DTYPES[dtype])
    kind, wide = (np.dtype(f"i{t.itemsize}") for t in (rules.dtype, rules.wide))
    drawn = [rng.integers(np.iinfo(k).min, np.iinfo(k).max, n, dtype=k) for k, n in ((kind, 160), (wide, 32))]
    patterns = [torch.as_tensor(part) for part in drawn]
    signalling = {torch.float32: 0x7F800001, torch.float64: 0x7FF0000000000001}[rules.wide]
    patterns[1][0] = signalling
    out, lse = patterns[0].view(rules.dtype).view(8, 4, 5), patterns[1].view(rules.wide).view(8, 4)
    verify(rules, [(out, lse), (out.flip(0), lse.flip(0))], 2)


def test_empty_shard(rules):
    """What its output holds travels along; only the LSE says that it counts for nothing."""
    out, lse = rules.tensor(np.full((1, 2, 3), math.nan)), torch.full((1, 2), -math.inf, dtype=rules.wide)
    verify(rules, [(out, lse), (torch.zeros_like(out), torch.zeros_like(lse))], 2)


@pytest.mark.parametrize(("dtype", "lse"), [("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "fp32"), ("fp64", "fp64")])
def test_shapes(dtype, lse):
    op = ops.AllToAll(Group("dcp", 4))
    out = Aval((3, 16, 512), dtype)
    assert op.infer(out, Aval((3, 16), lse)) == (Aval((4, 3, 4, 512), dtype), Aval((4, 3, 4), lse))
    with pytest.raises(ShapeError, match=r"all_to_all: axis H .* 16 in out, 15 in lse"):
        op.infer(out, Aval((3, 15), lse))
    with pytest.raises(ShapeError, match=r"all_to_all: axis T .* 3 in out, 2 in lse"):
        op.infer(out, Aval((2, 16), lse))
    with pytest.raises(ShapeError, match=r"all_to_all: axis H of out must be a multiple of dcp\[3\]: got 16"):
        ops.AllToAll(Group("dcp", 3)).infer(out, Aval((3, 16), lse))
    wrong = "fp64" if lse == "fp32" else "fp32"
    with pytest.raises(ShapeError, match=rf"all_to_all: lse must be {lse}, to go with out, {dtype}: got {wrong}"):
        op.infer(out, Aval((3, 16), wrong))
