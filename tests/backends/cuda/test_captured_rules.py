"""Rules of captured programs: against the reference, and without a look at any length."""

import numpy as np
import pytest
import torch

from mla_fx.backends import Run, cuda, reference
from mla_fx.backends.cuda import history_attention
from mla_fx.backends.kernels import with_kernels
from mla_fx.effects import Aval, ops
from tests.backends.bare import Watch
from tests.ops.conftest import TOLERANCE, aval, fields

LENGTHS = {ops.HistoryAttention: [Aval((1,), "int64")] * 2, ops.CurrentAttention: [Aval((1,), "int64")]}
TOKENS, HEADS, LATENT, ROPE = 6, 3, 8, 4
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def operands(rng, dtype, *, blocks, size, columns, query, history):
    """Of `ops.HistoryAttention` and `ops.CurrentAttention`, with blocks that no table has."""

    def random(*shape):
        return torch.as_tensor(rng.standard_normal(shape)).to(dtype)

    table = torch.as_tensor(rng.integers(0, blocks, (len(query), columns)).astype(np.int32))
    queries = random(TOKENS, HEADS, LATENT), random(TOKENS, HEADS, ROPE)
    caches = random(blocks, size, LATENT), random(blocks, size, ROPE)
    keys = random(TOKENS, LATENT), random(TOKENS, ROPE)
    return {
        ops.HistoryAttention(scale=0.7): (*queries, *caches, table, query, history),
        ops.CurrentAttention(scale=0.7): (*queries, *keys, query),
    }


def exactly(op, given):
    wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in given]
    return reference.TABLE.rules[type(op)](*wide, run=Run(), **fields(op))


def captured(op, given):
    sent = [torch.tensor(x) if isinstance(x, tuple) else x for x in given]
    return cuda.TABLE.captured[type(op)](*sent, run=Run(), **fields(op))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tile", [1, 8, 4096])
def test_against_the_reference(monkeypatch, dtype, tile):
    """Empty shards, requests without tokens, tokens without requests; softmax over one tile and over many."""
    monkeypatch.setattr(history_attention, "TILE", tile)
    rng = np.random.default_rng(tile)
    cases = (((1, 2, 0, 3), (0, 5, 4, 12)), ((0, 1, 0, 0), (7, 12, 0, 3)), ((0, 0, 0, 0), (0, 0, 0, 0)))
    for query, history in cases:
        given = operands(rng, dtype, blocks=9, size=4, columns=3, query=query, history=history)
        for op, some in given.items():
            for got, want in zip(captured(op, some), exactly(op, some), strict=True):
                relative, absolute = TOLERANCE[got.dtype]
                torch.testing.assert_close(got.double(), want, rtol=relative, atol=absolute)


def test_nothing_is_read_and_nothing_made_on_the_host():
    """On tensors without data, which have no lengths that could be looked at."""
    given = operands(np.random.default_rng(1), torch.bfloat16, blocks=9, size=4, columns=3, query=(1,), history=(2,))
    for op, some in given.items():
        sent = [(torch.tensor(x) if isinstance(x, tuple) else x).to("meta") for x in some]
        with Watch():
            results = cuda.TABLE.captured[type(op)](*sent, run=Run(), **fields(op))
        assert [aval(x) for x in results] == list(op.infer(*map(aval, sent[: -len(op.on_host())]), *LENGTHS[type(op)]))


def test_with_kernels_programs_are_captured_as_without():
    assert with_kernels(cuda.TABLE).captured == cuda.TABLE.captured
    assert cuda.TABLE.for_capture().rules[ops.HistoryAttention] is history_attention.captured
