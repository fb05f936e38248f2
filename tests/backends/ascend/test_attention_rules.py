"""The attention rules on the emulator: lengths, empty rows, head counts, paging; against the reference."""

import math

import pytest
import torch

from mla_fx.backends import Run, reference
from mla_fx.effects import Group, ops
from tests.backends.ascend.conftest import close, on_device, random, to_device, with_gaps
from tests.ops.conftest import exact, fields
from tests.ops.test_expanded_attention import by_hand

pytestmark = pytest.mark.usefixtures("emulator")
SIZES = {torch.bfloat16: (512, 64), torch.float16: (512, 64), torch.float32: (12, 4)}
each_dtype = pytest.mark.parametrize("dtype", SIZES, ids=str)
# query lengths, history lengths, tokens (the last ones padding)
CASES = [
    ((1,), (5,), 1),
    ((1, 1, 1), (3, 0, 90), 4),
    ((2, 0, 3), (1, 7, 33), 6),
    ((0, 0), (3, 4), 2),
    ((1, 2), (0, 0), 3),
    ((0, 2, 0, 0, 1), (0, 0, 4, 0, 16), 5),
    ((), (), 0),
    ((), (), 2),
]
SCALE = 0.05


def right(op, *operands):
    exact = [t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in operands]
    return reference.TABLE.rules[type(op)](*exact, run=Run(), **fields(op))


def verify(op, *operands):
    want, want_lse = right(op, *operands)
    for layout in (to_device, with_gaps):
        got, lse = on_device(op, *operands, layout=layout)
        assert got.dtype == operands[0].dtype and lse.dtype == torch.float32
        close(got, want)
        if isinstance(op, ops.CurrentAttention):  # here a row that no request owns has LSE 0
            want_lse[sum(operands[-1]) :] = 0
        none = want_lse.isneginf()  # either infinity says so: the operator writes the other one
        torch.testing.assert_close(lse.double().masked_fill(lse.isinf(), -math.inf), want_lse, rtol=1e-5, atol=1e-5)
        assert not got[none].any() and not got[sum(operands[5 if len(operands) > 5 else 4]) :].any()


def history(rng, dtype, query, lengths, tokens, *, heads=2, size=16):
    latent, rope = SIZES[dtype]
    need = [-(-keys // size) for keys in lengths]
    blocks = rng.permutation(sum(need) + 2).tolist()
    q_latent, q_rope = (random(rng, tokens, heads, width, dtype=dtype) for width in (latent, rope))
    caches = [torch.full((sum(need) + 2, size, width), math.nan, dtype=dtype) for width in (latent, rope)]
    table = torch.full((len(lengths), max(need, default=0) + 2), 2147480000, dtype=torch.int32)
    for b, keys in enumerate(lengths):
        for j in range(keys):
            if j % size == 0:
                table[b, j // size] = blocks.pop()
            for cache in caches:
                cache[table[b, j // size], j % size] = random(rng, cache.shape[-1], dtype=dtype)
    for query_part in (q_latent, q_rope):
        query_part[sum(query) :] = math.nan
    return q_latent, q_rope, *caches, table, query, lengths


def current(rng, dtype, query, tokens, *, heads=2):
    latent, rope = SIZES[dtype]
    parts = [random(rng, tokens, heads, width, dtype=dtype) for width in (latent, rope)]
    parts += [random(rng, tokens, width, dtype=dtype) for width in (latent, rope)]
    for part in parts:
        part[sum(query) :] = math.nan
    return *parts, query


@each_dtype
@pytest.mark.parametrize("case", CASES, ids=str)
def test_history_attention(rng, dtype, case):
    verify(ops.HistoryAttention(SCALE), *history(rng, dtype, *case))


@each_dtype
@pytest.mark.parametrize("case", CASES, ids=str)
def test_current_attention(rng, dtype, case):
    query, _, tokens = case
    verify(ops.CurrentAttention(SCALE), *current(rng, dtype, query, tokens))


def prompt(rng, dtype, query, tokens, *, heads=2, asked=None, nope=128, value=128):
    """Operands of the expanded form; keys of size 1, and what no request owns NaN."""
    asked, (latent, rope) = asked or heads, SIZES[dtype]
    parts = [random(rng, tokens, size, dtype=dtype) for size in (asked * (nope + rope), heads * rope, latent, rope)]
    for part in parts:
        part[sum(query) :] = math.nan
    parts[1] = parts[1].view(tokens, heads, rope)
    weights = [random(rng, *size, dtype=dtype) for size in ((asked, nope, latent), (asked, latent, value))]
    return *parts, *(weight / latent**0.5 for weight in weights), query


def verify_prompt(operands, *, group=None, rank=0):
    """Against the formula; keys and values are rounded on the way, as any projection is."""
    want, want_lse = by_hand(*(exact(t) for t in operands[:-1]), operands[-1], scale=SCALE, rank=rank)
    dtype, real = operands[0].dtype, sum(operands[-1])
    step = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-5}[dtype]
    for layout in (to_device, with_gaps):
        got, lse = on_device(ops.ExpandedAttention(SCALE, group), *operands, layout=layout, rank=rank)
        assert got.dtype == dtype and lse.dtype == torch.float32
        torch.testing.assert_close(got.double(), torch.tensor(want), rtol=2 * step, atol=2 * step)
        torch.testing.assert_close(lse[:real].double(), torch.tensor(want_lse)[:real], rtol=2 * step, atol=2 * step)
        assert not got[real:].any() and (torch.isneginf(lse[real:]) | (lse[real:] == 0)).all()


@each_dtype
@pytest.mark.parametrize("case", CASES, ids=str)
def test_expanded_attention(rng, dtype, case):
    query, _, tokens = case
    verify_prompt(prompt(rng, dtype, query, tokens))


def test_a_prompt_is_two_products_and_one_operator(rng, emulator):
    """Any head count as it is, and no cast of a float; sizes that it does not take are attended to in the latent."""
    for heads, value, features in ((3, 128, 128), (3, 256, 512)):
        with emulator.tracing() as trace:
            verify_prompt(prompt(rng, torch.bfloat16, (20, 1, 4), 26, heads=heads, value=value))
        tasks = [task for task in trace if task.name == "aclnnFusedInferAttentionScoreV4"]
        assert [task.operands[0][1] for task in tasks] == [(25, 3 if features == 128 else 4, features)] * 2
        assert sum(task.name == "aclnnMm" for task in trace) == (4 if features == 128 else 0)
        assert not any(task.casts for task in trace)


@pytest.mark.parametrize("value", [128, 96])
def test_a_prompt_takes_its_own_heads_of_all(rng, value):
    verify_prompt(prompt(rng, torch.float16, (2, 3), 6, asked=4, value=value), group=Group("dcp", 2), rank=1)


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 12, 16, 127, 128])
def test_any_head_count(rng, emulator, heads):
    """Counts that the operator refuses are padded on the way in, trimmed on the way out."""
    with emulator.tracing() as trace:
        verify(ops.HistoryAttention(SCALE), *history(rng, torch.bfloat16, (1, 2), (5, 0), 4, heads=heads))
        verify(ops.CurrentAttention(SCALE), *current(rng, torch.bfloat16, (1, 2), 4, heads=heads))
    counts = [task.operands[0][1][1] for task in trace if task.name == "aclnnFusedInferAttentionScoreV4"]
    assert counts == [1 << (heads - 1).bit_length()] * 4


@pytest.mark.parametrize("size", [16, 48, 128, 1024])
def test_block_sizes(rng, size):
    verify(ops.HistoryAttention(SCALE), *history(rng, torch.float16, (1, 1), (size + 3, 2), 2, size=size))


def test_long_prompt_in_one_step(rng):
    """A diagonal of more than one row, where sparse_mode 3 could be off by one."""
    verify(ops.CurrentAttention(SCALE), *current(rng, torch.bfloat16, (40, 1, 25), 66, heads=1))


def test_calls_are_those_of_the_contract(rng, emulator, monkeypatch):
    """History paged and unmasked, current with the template; and no cast of a float on the way."""
    seen = []
    namespace = torch.ops.npu
    real = namespace.npu_fused_infer_attention_score_v2.out

    class Spy:
        @staticmethod
        def out(*tensors, **named):
            seen.append(named)
            return real(*tensors, **named)

    monkeypatch.setattr(namespace, "npu_fused_infer_attention_score_v2", Spy)
    with emulator.tracing() as trace:
        verify(ops.HistoryAttention(SCALE), *history(rng, torch.bfloat16, (1, 2), (5, 20), 4))
        verify(ops.CurrentAttention(SCALE), *current(rng, torch.bfloat16, (1, 2), 4))
    first, _, second, _ = seen  # each a second time with strided operands
    assert first["actual_seq_qlen"] == [1, 3] and first["actual_seq_kvlen"] == [5, 20]
    assert second["actual_seq_qlen"] == second["actual_seq_kvlen"] == [1, 3]
    assert first["sparse_mode"] == 0 and "atten_mask" not in first and first["block_size"] == 16
    assert second["sparse_mode"] == 3 and second["atten_mask"].shape == (2048, 2048) and "block_table" not in second
    for call in seen:
        assert call["input_layout"] == "TND" and call["num_key_value_heads"] == 1 and call["softmax_scale"] == SCALE
        assert call["return_softmax_lse"] is True
    assert not any(task.casts for task in trace)
