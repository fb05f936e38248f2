"""Every Ascend rule on the emulator, held against the reference rule in float64."""

import itertools
import math
from functools import cache

import numpy as np
import pytest
import torch

from mla_fx.backends import Run, cpu, reference
from mla_fx.backends.ascend.emulator.releases import RELEASES
from mla_fx.effects import Group, ops
from tests.backends.ascend.conftest import close, on_device, over_ranks, random, with_gaps
from tests.cases import mostly_soak, pairwise
from tests.ops.conftest import Rules, fields

pytestmark = pytest.mark.usefixtures("emulator")
DTYPES, COUNTS = [torch.bfloat16, torch.float16, torch.float32], [0, 1, 3]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
sixteen_bits = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
each_count = pytest.mark.parametrize("tokens", COUNTS)
#: Of caches with 12 rows; the last ones are more than that.
SLOTS = [[3, -1, 0], [-1, -1, -1], [], [11, 7, 4], [*[-1] * 12, 5, -1, 3]]


def exact(operand):
    if isinstance(operand, torch.Tensor) and operand.is_floating_point():
        return operand.double()
    return operand


def right(op, *operands, rank=0):
    """What the reference says; states are copied."""
    copies = [t.clone() if isinstance(t, torch.Tensor) else t for t in map(exact, operands)]
    return reference.TABLE.rules[type(op)](*copies, run=Run(rank), **fields(op))


def group(ranks):
    return Group("dcp", ranks)


def on_host(op, given):
    """What every rank gets where all run on the CPU."""
    return Rules(cpu.TABLE, given[0][0].dtype).group(op, given)


def verify(op, *operands, rank=0):
    got, want = on_device(op, *operands, rank=rank), right(op, *operands, rank=rank)
    for ours, exactly in zip(got, want, strict=True):
        assert ours.shape == exactly.shape
        close(ours, exactly)
    for ours, exactly in zip(on_device(op, *operands, layout=with_gaps, rank=rank), want, strict=True):
        close(ours, exactly)
    return got


@each_dtype
@each_count
def test_linear(rng, dtype, tokens):
    x, weight = random(rng, tokens, 24, dtype=dtype), random(rng, 5, 24, dtype=dtype)
    assert verify(ops.Linear(), x, weight)[0].dtype == dtype


@each_dtype
@each_count
def test_add(rng, dtype, tokens):
    verify(ops.Add(), random(rng, tokens, 5, dtype=dtype), random(rng, tokens, 5, dtype=dtype))


@each_dtype
@each_count
@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
def test_rms_norm_of_the_first_features(rng, dtype, tokens, epsilon):
    x, weight = random(rng, tokens, 20, dtype=dtype), random(rng, 16, dtype=dtype)
    x[:, 16:] = math.nan
    verify(ops.RmsNorm(epsilon), x, weight)


def of_all(**axes):
    """With every release and dtype."""
    return pytest.mark.parametrize(*pairwise(release=[*RELEASES], dtype=DTYPES, **axes), indirect=["release"], ids=str)


@of_all(tokens=COUNTS, size=[(128, 128), (16, 32), (6, 10)])
def test_absorb_query(rng, release, dtype, tokens, size):
    nope, latent = size
    q, w_uk = random(rng, tokens, 3 * (nope + 4), dtype=dtype), random(rng, 3, nope, latent, dtype=dtype)
    q.view(tokens, 3, nope + 4)[..., nope:] = math.nan
    verify(ops.AbsorbQuery(rope=4), q, w_uk / nope**0.5)


@of_all(tokens=COUNTS, size=[(128, 128), (32, 16), (10, 7)])
def test_v_up(rng, release, dtype, tokens, size):
    latent, value = size
    w_uv = random(rng, 3, latent, value, dtype=dtype) / latent**0.5
    verify(ops.VUp(), random(rng, tokens, 3, latent, dtype=dtype), w_uv)


@cache
def weights(heads, value, dtype):
    return random(np.random.default_rng(11), heads, 512, value, dtype=dtype) / 16


@pytest.mark.parametrize(
    ("dtype", "tokens"),
    mostly_soak(itertools.product([torch.bfloat16, torch.float16], [0, 3]), [(torch.bfloat16, 3), (torch.float16, 0)]),
)
@pytest.mark.parametrize(
    ("heads", "value", "since"),
    [(127, 128, "8.5"), (127, 16, "9.0"), (128, 16, "9.1"), (128, 10, "9.1")],
    ids=str,
)
def test_v_up_at_the_limits(rng, emulator, release, dtype, tokens, heads, value, since):
    """127 x 512 = 65024 is below 65536, 128 x 512 is not: same result by two ways, whatever the release takes."""
    operator = "aclnnTransposeBatchMatMul" if release >= since else "aclnnBatchMatMul"
    attn, w_uv = random(rng, tokens, heads, 512, dtype=dtype), weights(heads, value, dtype)
    with emulator.tracing() as trace:
        verify(ops.VUp(), attn, w_uv)
    products = [task.name for task in trace if "MatMul" in task.name]
    assert set(products) == ({operator} if tokens else set())


@pytest.mark.parametrize("magnitude", [1.0, 1.25])
def test_rope_angles(magnitude):
    """Float32 of exact angles, at all positions: a float32 product would be off by 0.004 at 100000."""
    positions = torch.tensor([0, 1, 2047, 2048, 2049, 100_000, 163_839, 2048 * 2048 - 1])
    like = torch.empty(len(positions), 1, dtype=torch.bfloat16)
    op = ops.RopeAngles(frequencies=(1.0, 0.7, 0.0390069, 3.3338e-6), magnitude=magnitude)
    got, want = on_device(op, positions, like), right(op, positions, like)
    for ours, exactly in zip(got, want, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), exactly.double(), rtol=0, atol=3e-7)
    op = ops.RopeAngles(op.frequencies, magnitude, rounded=True)
    for ours, wide in zip(on_device(op, positions, like), got, strict=True):
        assert torch.equal(ours, wide.to(torch.bfloat16))


@each_dtype
@each_count
@pytest.mark.parametrize("heads", [None, 1, 3])
def test_rope(rng, dtype, tokens, heads):
    x = random(rng, tokens, (heads or 1) * 14, dtype=dtype)
    x.view(tokens, heads or 1, 14)[..., :6] = math.nan
    turn = random(rng, tokens, 8, dtype=torch.float32)
    verify(ops.Rope(heads), x, turn.cos(), turn.sin())
    verify(ops.Rope(heads), x, turn.cos().to(dtype), turn.sin().to(dtype))


@each_dtype
@pytest.mark.parametrize("slots", SLOTS, ids=str)
def test_write_rows(rng, dtype, slots):
    cache, rows = random(rng, 3, 4, 16, dtype=dtype), random(rng, len(slots), 16, dtype=dtype)
    verify(ops.WriteRows(), cache, rows, torch.tensor(slots, dtype=torch.int64))


@each_dtype
@each_count
def test_swiglu(rng, dtype, tokens):
    verify(ops.Swiglu(), random(rng, tokens, 12, dtype=dtype))


@each_dtype
@each_count
def test_gate_logits_are_float32(rng, dtype, tokens):
    (got,) = verify(ops.GateLogits(), random(rng, tokens, 24, dtype=dtype), random(rng, 8, 24, dtype=dtype))
    assert got.dtype == torch.float32


@each_dtype
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("tokens", [[0, 9, 4, 7, -1, 3, 8, 4, 10, 11], []], ids=["some", "none"])
def test_embedding(rng, dtype, rank, tokens):
    """Ten words over three ranks of four: the last rank's table is padded, and no padding is given out."""
    table = random(rng, 4, 5, dtype=dtype)
    verify(ops.Embedding(10, group(3)), torch.tensor(tokens, dtype=torch.int64), table, rank=rank)


@each_dtype
@pytest.mark.parametrize("rows", [[2, 0, 2], []], ids=["some", "none"])
def test_take_rows(rng, dtype, rows):
    verify(ops.TakeRows(), random(rng, 3, 5, dtype=dtype), torch.tensor(rows, dtype=torch.int64))


@each_dtype
@each_count
@pytest.mark.parametrize("features", [6, 5])
def test_all_gather(rng, dtype, tokens, features):
    given = [(random(rng, tokens, 2, dtype=dtype),) for _ in range(3)]
    op = ops.AllGather(features, group(3))
    for ours, exactly in zip(over_ranks(op, given), on_host(op, given), strict=True):
        assert torch.equal(ours[0], exactly[0])


@each_dtype
def test_local_heads(rng, dtype):
    for rank in range(3):
        verify(ops.LocalHeads(group(3)), random(rng, 2, 6, 5, dtype=dtype), rank=rank)


@each_dtype
@pytest.mark.parametrize("count", [0, 1, 3])
def test_split_and_join_tokens(rng, dtype, count):
    x = random(rng, 3, 5, dtype=dtype)
    verify(ops.SplitTokens(count), x)
    verify(ops.JoinTokens(), x[:count].contiguous(), x[count:].contiguous())


@each_dtype
@pytest.mark.parametrize("rank", [0, 2])
def test_v_up_of_own_heads_apart(rng, dtype, rank):
    attn, w_uv = random(rng, 3, 2, 16, dtype=dtype), random(rng, 6, 16, 8, dtype=dtype)
    verify(ops.VUp(group(3), flat=False), attn, w_uv, rank=rank)


@each_dtype
def test_combine_flat(rng, dtype):
    parts, lse = random(rng, 2, 3, 2, 8, dtype=dtype), random(rng, 2, 3, 2, dtype=torch.float32)
    verify(ops.Combine(flat=True), parts, lse, parts[0], lse[0])


@each_dtype
@each_count
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gather_heads(rng, dtype, tokens, ranks):
    given = [tuple(random(rng, tokens, 2, size, dtype=dtype) for size in (8, 4)) for _ in range(ranks)]
    op = ops.GatherHeads(group(ranks))
    for ours, exactly in zip(over_ranks(op, given), on_host(op, given), strict=True):
        assert all(map(torch.equal, ours, exactly))


@each_dtype
@each_count
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_all_reduce(rng, dtype, tokens, ranks):
    given = [(random(rng, tokens, 4, dtype=dtype),) for _ in range(ranks)]
    got = over_ranks(ops.AllReduce(group(ranks)), given)
    want = torch.stack([x.double() for (x,) in given]).sum(0)
    for (ours,) in got:
        close(ours, want)
        assert torch.equal(ours, got[0][0])


BITS = {2: torch.int16, 4: torch.int32}
NASTY = [65504.0, -7e4, 70000.25, 3e38, 1e-30, -1e-45, 0.0, -0.0, math.inf, -math.inf, math.nan, 128 - 2**-17]


def same_bits(ours, exactly):
    assert ours.dtype == exactly.dtype
    assert torch.equal(ours.view(BITS[ours.dtype.itemsize]), exactly.view(BITS[ours.dtype.itemsize]))


@each_dtype
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_to_all_bit_for_bit(rng, dtype, ranks):
    """Every rank gets its heads of all, whatever the bits of an LSE are: signalling NaN, subnormals, no 16 bits."""
    given = []
    for rank in range(ranks):
        lse = torch.tensor(NASTY, dtype=torch.float32).roll(rank).view(3, 4)
        lse.view(torch.int32)[0, rank % 4] = 0x7F800001 + rank
        given.append((random(rng, 3, 4, 8, dtype=dtype), lse))
    own = 4 // ranks
    for rank, got in enumerate(over_ranks(ops.AllToAll(group(ranks)), given)):
        for k, ours in enumerate(got):
            same_bits(ours, torch.stack([sent[k][:, rank * own : (rank + 1) * own] for sent in given]))


@each_dtype
@each_count
def test_all_to_all_of_any_count(rng, dtype, tokens):
    given = [(random(rng, tokens, 4, 8, dtype=dtype), random(rng, tokens, 4, dtype=torch.float32)) for _ in range(2)]
    op = ops.AllToAll(group(2))
    for got, want in zip(over_ranks(op, given), on_host(op, given), strict=True):
        for ours, exactly in zip(got, want, strict=True):
            same_bits(ours, exactly)


class Parts:
    """Partials of `ranks` ranks and a local one."""

    def __init__(self, rng, ranks, tokens, heads, latent, dtype):
        self.out = random(rng, ranks, tokens, heads, latent, dtype=dtype)
        self.lse = 3 * random(rng, ranks, tokens, heads, dtype=torch.float32)
        self.local = random(rng, tokens, heads, latent, dtype=dtype)
        self.local_lse = random(rng, tokens, heads, dtype=torch.float32)

    def hide(self, unseen, none):
        """Some parts saw no key: their output is NaN, which weight 0 would let through."""
        if unseen in ("source", "rows"):
            where = (slice(1, 2),) if unseen == "source" else ([0, 1, 2, 2], [0, 1, 0, 1], [1, 1, 1, 0])
            self.lse[where], self.out[where] = none, math.nan
        if unseen in ("all sources", "everything"):
            self.lse[:], self.out[:] = none, math.nan
        if unseen in ("local", "everything"):
            self.local_lse[:], self.local[:] = none, math.nan

    def verify(self):
        return verify(ops.Combine(), self.out, self.lse, self.local, self.local_lse)[0]


@each_dtype
@pytest.mark.parametrize("shape", [(1, 1, 1, 8), (2, 3, 2, 16), (8, 2, 1, 512), (15, 1, 4, 8), (3, 0, 2, 8)], ids=str)
def test_combine(rng, dtype, shape):
    Parts(rng, *shape, dtype).verify()


@of_all(size=[(3, 1), (3, 12), (3, 520), (20, 1031)])
def test_combine_of_any_features(rng, release, dtype, size):
    """In slices of 512, padded to a multiple of 8; in rounds too."""
    ranks, latent = size
    parts = Parts(rng, ranks, 2, 2, latent, dtype)
    parts.hide("rows", -math.inf)
    parts.verify()


@each_dtype
@pytest.mark.parametrize("none", [-math.inf, math.inf])
@pytest.mark.parametrize("unseen", ["source", "rows", "all sources", "local", "everything"])
def test_combine_where_a_part_saw_no_key(rng, dtype, unseen, none):
    parts = Parts(rng, 3, 2, 2, 8, dtype)
    parts.hide(unseen, none)
    got = parts.verify()
    assert got.isfinite().all()
    assert unseen != "everything" or not got.any()


@of_all(ranks=[16, 31, 127, 128, 300])
def test_combine_of_more_parts_than_the_operator_takes(rng, emulator, release, dtype, ranks):
    """In rounds, and rounded once: of the groups some saw no key at all, and one row was seen by nobody."""
    parts = Parts(rng, ranks, 2, 2, 8, dtype)
    parts.lse[:16], parts.out[:16] = -math.inf, math.nan
    parts.lse[:, 1, 1], parts.out[:, 1, 1] = math.inf, math.nan
    parts.local_lse[1, 1], parts.local[1, 1] = math.inf, math.nan
    with emulator.tracing() as trace:
        got = parts.verify()
    assert got.isfinite().all() and not got[1, 1].any()
    most, left, calls = 128 if release == "9.1" else 16, ranks + 1, 1
    while left > most:
        left = -(-left // most)
        calls += left
    assert sum(task.name == "aclnnAttentionUpdate" for task in trace) == calls * 2  # `verify` tries two layouts


@pytest.mark.parametrize("ranks", [2, 20])
@pytest.mark.parametrize("none", [-math.inf, math.inf])
def test_nan_in_an_lse_is_not_hidden_by_combine(rng, release, ranks, none):
    parts = Parts(rng, ranks, 2, 1, 8, torch.bfloat16)
    parts.lse[:], parts.local_lse[:] = none, none
    parts.lse[1, 0] = math.nan
    got = parts.verify()
    assert got[0].isnan().all() and not got[1].any()
