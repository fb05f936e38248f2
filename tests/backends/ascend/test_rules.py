"""Every Ascend rule on the emulator, held against the reference rule in float64."""

import math

import attrs
import pytest
import torch

from mla_fx.backends import cpu, reference
from mla_fx.effects import ops
from mla_fx.payload import pack
from tests.backends.ascend.conftest import close, on_device, over_ranks, random, with_gaps

pytestmark = pytest.mark.usefixtures("emulator")
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
sixteen_bits = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
each_count = pytest.mark.parametrize("tokens", [0, 1, 3])


def exact(operand):
    if isinstance(operand, torch.Tensor) and operand.is_floating_point():
        return operand.double()
    return operand


def right(op, *operands, **rank):
    """What the reference says; states are copied."""
    copies = [t.clone() if isinstance(t, torch.Tensor) else t for t in map(exact, operands)]
    return reference.RULES[type(op)](*copies, **attrs.asdict(op), **rank)


def verify(op, *operands, **rank):
    got, want = on_device(op, *operands, **rank), right(op, *operands, **rank)
    for ours, exactly in zip(got, want, strict=True):
        assert ours.shape == exactly.shape
        close(ours, exactly)
    for ours, exactly in zip(on_device(op, *operands, layout=with_gaps, **rank), want, strict=True):
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


@each_dtype
@each_count
@pytest.mark.parametrize(("nope", "latent"), [(16, 32), (6, 10)], ids=["fused", "fallback"])
def test_absorb_query(rng, dtype, tokens, nope, latent):
    q, w_uk = random(rng, tokens, 3 * (nope + 4), dtype=dtype), random(rng, 3, nope, latent, dtype=dtype)
    q.view(tokens, 3, nope + 4)[..., nope:] = math.nan
    verify(ops.AbsorbQuery(rope=4), q, w_uk)


@each_dtype
@each_count
@pytest.mark.parametrize(("latent", "value"), [(32, 16), (10, 7)], ids=["fused", "fallback"])
def test_v_up(rng, dtype, tokens, latent, value):
    verify(ops.VUp(), random(rng, tokens, 3, latent, dtype=dtype), random(rng, 3, latent, value, dtype=dtype))


@sixteen_bits
@pytest.mark.parametrize(
    ("heads", "operator"), [(127, "aclnnTransposeBatchMatMul"), (128, "aclnnBatchMatMul")], ids=["fused", "fallback"]
)
@each_count
def test_v_up_at_the_limit(rng, emulator, dtype, tokens, heads, operator):
    """127 x 512 = 65024 is below 65536, 128 x 512 is not: same result by two ways."""
    attn, w_uv = random(rng, tokens, heads, 512, dtype=dtype), random(rng, heads, 512, 16, dtype=dtype) / 16
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


@each_dtype
@each_count
@pytest.mark.parametrize("heads", [None, 1, 3])
def test_rope(rng, dtype, tokens, heads):
    x = random(rng, tokens, (heads or 1) * 14, dtype=dtype)
    x.view(tokens, heads or 1, 14)[..., :6] = math.nan
    turn = random(rng, tokens, 4, dtype=torch.float32)
    verify(ops.Rope(heads), x, turn.cos(), turn.sin())


@each_dtype
@pytest.mark.parametrize("slots", [[3, -1, 0], [-1, -1, -1], [], [11, 7, 4], [*[-1] * 12, 5, -1, 3]], ids=str)
def test_write_cache(rng, dtype, slots):
    caches = [random(rng, 3, 4, size, dtype=dtype) for size in (16, 8)]
    rows = [random(rng, len(slots), size, dtype=dtype) for size in (16, 8)]
    verify(ops.WriteCache(), *caches, *rows, torch.tensor(slots, dtype=torch.int64))


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
    verify(ops.Embedding(vocabulary=10, ranks=3), torch.tensor(tokens, dtype=torch.int64), table, rank=rank)


@each_dtype
@pytest.mark.parametrize("rows", [[2, 0, 2], []], ids=["some", "none"])
def test_take_rows(rng, dtype, rows):
    verify(ops.TakeRows(), random(rng, 3, 5, dtype=dtype), torch.tensor(rows, dtype=torch.int64))


@each_dtype
@each_count
@pytest.mark.parametrize("features", [6, 5])
def test_all_gather(rng, dtype, tokens, features):
    given = [(random(rng, tokens, 2, dtype=dtype),) for _ in range(3)]
    want = cpu.RULES[ops.AllGather](given, features=features, ranks=3)
    for ours, exactly in zip(over_ranks(ops.AllGather(features, 3), given), want, strict=True):
        assert torch.equal(ours[0], exactly[0])


@each_dtype
def test_local_heads(rng, dtype):
    for rank in range(3):
        verify(ops.LocalHeads(3), random(rng, 2, 6, 5, dtype=dtype), rank=rank)


@each_dtype
@each_count
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gather_heads(rng, dtype, tokens, ranks):
    given = [tuple(random(rng, tokens, 2, size, dtype=dtype) for size in (8, 4)) for _ in range(ranks)]
    want = cpu.RULES[ops.GatherHeads](given, ranks=ranks)
    for ours, exactly in zip(over_ranks(ops.GatherHeads(ranks), given), want, strict=True):
        assert all(map(torch.equal, ours, exactly))


@each_dtype
@each_count
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_all_reduce(rng, dtype, tokens, ranks):
    given = [(random(rng, tokens, 4, dtype=dtype),) for _ in range(ranks)]
    got = over_ranks(ops.AllReduce(), given)
    want = reference.RULES[ops.AllReduce]([(x.double(),) for (x,) in given])
    for (ours,), (exactly,) in zip(got, want, strict=True):
        close(ours, exactly)
        assert torch.equal(ours, got[0][0])


BITS = {2: torch.int16, 4: torch.int32}
NASTY = [65504.0, -7e4, 70000.25, 3e38, 1e-30, -1e-45, 0.0, -0.0, math.inf, -math.inf, math.nan, 128 - 2**-17]


@each_dtype
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_to_all_bit_for_bit(rng, dtype, ranks):
    """As the CPU packs it, whatever the bits of an LSE are: signalling NaN, subnormals, what no 16 bits hold."""
    given = []
    for rank in range(ranks):
        lse = torch.tensor(NASTY, dtype=torch.float32).roll(rank).view(3, 4)
        lse.view(torch.int32)[0, rank % 4] = 0x7F800001 + rank
        given.append((random(rng, 3, 4, 8, dtype=dtype), lse))
    want = cpu.RULES[ops.AllToAll](given, ranks=ranks)
    for (ours,), (exactly,) in zip(over_ranks(ops.AllToAll(ranks), given), want, strict=True):
        assert ours.dtype == dtype
        assert torch.equal(ours.view(BITS[dtype.itemsize]), exactly.view(BITS[dtype.itemsize]))


@each_dtype
@each_count
def test_all_to_all_of_any_count(rng, dtype, tokens):
    given = [(random(rng, tokens, 4, 8, dtype=dtype), random(rng, tokens, 4, dtype=torch.float32)) for _ in range(2)]
    want = cpu.RULES[ops.AllToAll](given, ranks=2)
    for (ours,), (exactly,) in zip(over_ranks(ops.AllToAll(2), given), want, strict=True):
        assert torch.equal(ours.view(BITS[dtype.itemsize]), exactly.view(BITS[dtype.itemsize]))


class Parts:
    """Partials of `ranks` ranks and a local one, as payload in a dtype and in float64."""

    def __init__(self, rng, ranks, tokens, heads, latent, dtype):
        self.out = random(rng, ranks, tokens, heads, latent, dtype=dtype)
        self.lse = 3 * random(rng, ranks, tokens, heads, dtype=torch.float32)
        self.local = random(rng, tokens, heads, latent, dtype=dtype)
        self.local_lse = random(rng, tokens, heads, dtype=torch.float32)

    def verify(self):
        def payload(out, lse):
            return torch.stack([pack(o, x, ranks=1)[0] for o, x in zip(out, lse, strict=True)])

        (got,) = on_device(ops.Combine(), payload(self.out, self.lse), self.local, self.local_lse)
        recv = payload(self.out.double(), self.lse.double())
        (want,) = reference.RULES[ops.Combine](recv, self.local.double(), self.local_lse.double())
        close(got, want)
        return got


@each_dtype
@pytest.mark.parametrize("shape", [(1, 1, 1, 8), (2, 3, 2, 16), (8, 2, 1, 512), (15, 1, 4, 8), (3, 0, 2, 8)], ids=str)
def test_combine(rng, dtype, shape):
    Parts(rng, *shape, dtype).verify()


@each_dtype
@pytest.mark.parametrize("unseen", ["source", "rows", "all sources", "local", "everything"])
def test_combine_where_a_part_saw_no_key(rng, dtype, unseen):
    """Its output is NaN, which weight 0 would let through."""
    parts = Parts(rng, 3, 2, 2, 8, dtype)
    if unseen in ("source", "rows"):
        where = (slice(1, 2),) if unseen == "source" else ([0, 1, 2, 2], [0, 1, 0, 1], [1, 1, 1, 0])
        parts.lse[where], parts.out[where] = -math.inf, math.nan
    if unseen in ("all sources", "everything"):
        parts.lse[:], parts.out[:] = -math.inf, math.nan
    if unseen in ("local", "everything"):
        parts.local_lse[:], parts.local[:] = -math.inf, math.nan
    got = parts.verify()
    assert got.isfinite().all()
    assert unseen != "everything" or not got.any()
