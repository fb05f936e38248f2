"""The kernels of the exchange in Triton's interpreter, against the layout of the payload and against the reference.

The interpreter cuts off where it makes bf16 of float32, and a device rounds: so
bf16 is held to a whole unit in the last place here, not to half of one.
"""

import math

import pytest
import torch
from torch.utils._pytree import tree_leaves

from mla_fx import backends, orchestrations
from mla_fx.backends import Run, cpu, cuda, reference
from mla_fx.backends import kernels as package
from mla_fx.backends.ascend.fused.merge_attention import MergeAttention
from mla_fx.backends.common.payload import pack, unpack
from mla_fx.backends.kernels import rules, with_kernels
from mla_fx.effects import Group, ops, schedule
from tests.backends.bare import Watch
from tests.backends.kernels.interpreter import compiled, interpreted, why_not
from tests.cases import mostly_soak
from tests.ops.conftest import bits
from tests.setups import Setup

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
#: Of a number, and of sums of size 1.
TOLERANCE = {torch.bfloat16: (2**-7, 1e-5), torch.float16: (2**-11, 1e-5), torch.float32: (1e-5, 1e-5)}
#: Ranks, tokens, own heads, features: heads in all 1 to 128, most no power of two.
SIZES = [(1, 1, 1, 1), (2, 3, 3, 5), (16, 1, 8, 8), (5, 2, 25, 7), (3, 2, 1, 129), (4, 2, 2, 512)]
each_size = pytest.mark.parametrize("size", SIZES, ids=str)


@pytest.fixture(scope="module", autouse=True)
def interpreter():
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with interpreted():
        yield


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(3)


def any_bits(generator, shape, dtype):
    """Every pattern may be there: NaNs of all kinds, subnormal numbers, infinities."""
    width = 8 * dtype.itemsize
    kind = {16: torch.int16, 32: torch.int32, 64: torch.int64}[width]
    high = 2 ** (width - 1) - 1
    return torch.randint(-high - 1, high, shape, generator=generator, dtype=torch.int64).to(kind).view(dtype)


def halves(payload, shape):
    return [bits(part) for part in unpack(payload, shape)]


# --- pack -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@each_size
def test_what_is_sent(generator, dtype, size):
    """Bit for bit what lies in the payload, whatever the bits are of outputs and LSEs."""
    ranks, tokens, own, latent = size
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    out = any_bits(generator, (tokens, ranks * own, latent), dtype)
    lse = any_bits(generator, (tokens, ranks * own), kind)
    sent = rules.send(out, lse, run=Run(0), group=Group("dcp", ranks))
    wanted = pack(out, lse, ranks=ranks)
    assert sent.is_contiguous() and (sent.shape, sent.dtype) == (wanted.shape, wanted.dtype)
    for got, want in zip(*(halves(one, (tokens, own, latent)) for one in (sent, wanted)), strict=True):
        assert torch.equal(got, want)
    for r, part in enumerate(unpack(sent, (tokens, own, latent))[1]):  # and that is by heads of each rank
        assert torch.equal(bits(part), bits(lse[:, r * own : (r + 1) * own]))


#: Halves that are NaN, infinite, subnormal, zero in bf16 or fp16, low and high.
HALVES = [0x7F80, 0x7FC1, 0xFF81, 0x7C00, 0x7E01, 0xFC01, 0x0001, 0x8001, 0x007F, 0x03FF, 0x0000, 0x8000]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_an_lse_whose_halves_are_special_arrives(dtype):
    words = torch.tensor([[high << 16 | low for low in HALVES] for high in HALVES]).to(torch.int32)
    lse = words.view(torch.float32)
    sent = rules.send(torch.zeros(*lse.shape, 3).to(dtype), lse, run=Run(0), group=Group("dcp", 4))
    got = unpack(sent, (len(HALVES), len(HALVES) // 4, 3))[1]
    assert torch.equal(bits(got).transpose(0, 1).reshape(words.shape), words)


def test_operands_with_gaps_are_sent_alike(generator):
    out = any_bits(generator, (3, 8, 10), torch.bfloat16)
    lse = any_bits(generator, (4, 6), torch.float32)[:, ::2].T
    sent = [rules.send(one, lse, run=Run(0), group=Group("dcp", 2)) for one in (out[:, ::2], out[:, ::2].clone())]
    for got, want in zip(*(halves(one, (3, 2, 10)) for one in sent), strict=True):
        assert torch.equal(got, want)


# --- merge ------------------------------------------------------------------------------


class Parts:
    """What W ranks sent, as it has arrived, and the local part."""

    def __init__(self, generator, size, dtype, spread=3.0):
        self.shape, self.dtype = size, dtype
        ranks, *shape, latent = size
        self.recv = torch.randn(size, generator=generator).to(dtype)
        self.recv_lse = torch.randn(ranks, *shape, generator=generator) * spread
        self.local = torch.randn(*shape, latent, generator=generator).to(dtype)
        self.local_lse = torch.randn(shape, generator=generator) * spread

    def arrived(self):
        """Received parts as views of payloads, between which are gaps."""
        sent = [pack(out, lse, ranks=1)[0] for out, lse in zip(self.recv, self.recv_lse, strict=True)]
        return *unpack(torch.stack(sent), self.shape[1:]), self.local, self.local_lse

    def verify(self):
        """What comes of the parts, where they have arrived, and of contiguous ones."""
        (got,) = rules.combine(*self.arrived(), run=Run(0))
        given = self.recv, self.recv_lse, self.local, self.local_lse
        (same,) = rules.combine(*given, run=Run(0))
        (flat,) = rules.combine(*given, run=Run(0), flat=True)
        assert torch.equal(bits(flat), bits(same.flatten(1)))
        (want,) = reference.TABLE.rules[ops.Combine](*(one.double() for one in given), run=Run(0), flat=False)
        assert got.is_contiguous() and torch.equal(bits(got), bits(same)) and got.dtype == self.dtype
        relative, absolute = TOLERANCE[self.dtype]
        torch.testing.assert_close(got.double(), want, rtol=relative, atol=absolute, equal_nan=True)
        return got


@each_dtype
@each_size
def test_what_is_merged(generator, dtype, size):
    parts = Parts(generator, size, dtype)

    parts.verify()


@pytest.mark.parametrize("ranks", mostly_soak(range(1, 17), (1, 2, 7, 8, 15, 16)))
def test_any_number_of_ranks(generator, ranks):
    Parts(generator, (ranks, 3, 7, 6), torch.bfloat16).verify()


@each_dtype
@pytest.mark.parametrize("none", [-math.inf, math.inf])
def test_parts_that_saw_no_key(generator, dtype, none):
    """Of each row some part, of one all, which gives 0; what such a part holds is nobody's."""
    parts = Parts(generator, (3, 5, 3, 6), dtype)
    for r in range(3):
        parts.recv_lse[r, r], parts.recv[r, r] = none, math.nan
    parts.local_lse[3], parts.local[3] = none, math.inf
    parts.recv_lse[:, 4, 1], parts.recv[:, 4, 1] = none, math.nan
    parts.local_lse[4, 1], parts.local[4, 1] = none, math.nan
    got = parts.verify()
    assert got.isfinite().all() and not got[4, 1].any() and got[4, 0].any()


def test_rows_of_padding(generator):
    """Nobody's: no history, and in the local part output 0 with LSE 0, which stays 0."""
    parts = Parts(generator, (2, 4, 3, 8), torch.bfloat16)
    parts.recv_lse[:, 2:], parts.recv[:, 2:] = math.inf, math.nan
    parts.local_lse[2:], parts.local[2:] = 0, 0
    got = parts.verify()
    assert not got[2:].any() and got[:2].any()


@pytest.mark.parametrize("where", ["received", "local"])
@pytest.mark.parametrize("others", [None, -math.inf, math.inf])
def test_nan_in_an_lse_is_not_hidden(generator, where, others):
    parts = Parts(generator, (2, 2, 1, 3), torch.float32)
    if others is not None:
        parts.recv_lse[:], parts.local_lse[:] = others, others
    (parts.recv_lse[1] if where == "received" else parts.local_lse)[0] = math.nan
    got = parts.verify()
    assert got[0].isnan().all() and got[1].isfinite().all()


@pytest.mark.parametrize("lse", [70000.25, -7e4, 3e38, -3e38, 1e-45])
def test_lse_of_any_size(generator, lse):
    parts = Parts(generator, (3, 1, 2, 4), torch.float32)
    parts.recv_lse[:], parts.local_lse[:] = lse, lse
    parts.verify()


@pytest.mark.parametrize("high", [0, 1, 2], ids=["first", "last", "local"])
def test_lses_far_apart(generator, high):
    """Only one part counts, wherever it is; the weights are taken from the largest LSE, or they would overflow."""
    parts = Parts(generator, (2, 2, 3, 4), torch.float32)
    lses = [*parts.recv_lse, parts.local_lse]
    for k, lse in enumerate(lses):
        lse += 400 if k == high else -400
    assert torch.equal(parts.verify(), [*parts.recv, parts.local][high])


# --- both -------------------------------------------------------------------------------


def test_more_than_there_are_programs(generator, monkeypatch):
    """Programs take turns: the last turn of both is not full."""
    monkeypatch.setattr(rules, "PROGRAMS", 3)
    monkeypatch.setattr(rules, "BLOCK", 8)
    test_what_is_sent(generator, torch.bfloat16, (4, 2, 3, 6))
    Parts(generator, (2, 5, 3, 4), torch.bfloat16).verify()


@each_dtype
def test_zero_tokens(dtype):
    """Nothing is launched, and shapes are right."""
    sent = rules.send(torch.zeros(0, 6, 4).to(dtype), torch.zeros(0, 6), run=Run(0), group=Group("dcp", 3))
    assert sent.shape == (3, 0) and sent.dtype == dtype
    given = torch.zeros(3, 0, 2, 4).to(dtype), torch.zeros(3, 0, 2), torch.zeros(0, 2, 4).to(dtype), torch.zeros(0, 2)
    (merged,) = rules.combine(*given, run=Run(0))
    assert merged.shape == (0, 2, 4) and merged.dtype == dtype


class Launches(Watch):
    """Operators of torch that do something on a device: all that are no view and give no new, unwritten memory."""

    QUIET = ("new_empty", "empty_like", "view", "slice", "as_strided", "alias", "detach")

    @property
    def loud(self):
        names = [name.split("::")[1].split(".")[0] for name in self.called]
        return [name for name in names if name not in self.QUIET]


def test_one_launch_each(generator, monkeypatch):
    """Beside the kernel nothing reaches a device, as operands come in a program: the local part is read in place."""
    launched = []
    for name in ("pack", "merge"):
        monkeypatch.setattr(f"mla_fx.backends.kernels.exchange.{name}", Noted(name, launched))
    parts = Parts(generator, (2, 3, 4, 8), torch.bfloat16)
    given, out, lse = parts.arrived(), torch.zeros(3, 8, 8).bfloat16(), torch.zeros(3, 8)
    with Launches(device=None) as watch:
        rules.send(out, lse, run=Run(0), group=Group("dcp", 2))
        rules.combine(*given, run=Run(0))
    assert watch.loud == [] and [name for name, _ in launched] == ["pack", "merge"]
    places = {one.data_ptr() for one in launched[1][1] if isinstance(one, torch.Tensor)}
    assert {one.data_ptr() for one in given} <= places


class Noted:
    """In the place of a kernel."""

    def __init__(self, name, launched):
        self.name, self.launched = name, launched

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.launched.append((self.name, arguments))


def test_the_compiler_of_triton_ascend_takes_them(processes):
    """Which the interpreter does not show: it runs any Python."""
    (found,) = processes.run(compiled, ranks=1)
    assert found == ["pack i16", "pack i32", "merge bf16", "merge fp16", "merge fp32"]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(200))
def test_any_sizes(seed):
    """Of which the plain suite takes a sample above."""
    generator = torch.Generator().manual_seed(seed)

    def upto(most):
        return int(torch.randint(1, most + 1, (), generator=generator))

    ranks, tokens, latent, dtype = upto(16), upto(5), upto(520), DTYPES[seed % 3]
    own = upto(128 // ranks)
    test_what_is_sent(generator, dtype, (ranks, tokens, own, latent))
    parts = Parts(generator, (ranks, tokens, own, latent), dtype, spread=30.0)
    parts.recv_lse[torch.rand(parts.recv_lse.shape, generator=generator) < 0.3] = math.inf
    parts.recv[parts.recv_lse.isinf()] = math.nan
    parts.verify()


# --- in a table -------------------------------------------------------------------------


@pytest.mark.parametrize("table", [cpu.TABLE, cuda.TABLE], ids=["cpu", "cuda"])
def test_a_decode_step_with_kernels(table):
    """Against the reference; on the hostile machine the bits of a plain run."""
    given = Setup(ranks=2, dtype="bf16")
    program = schedule(given.step, orchestrations.attention_aside)

    def found(backend):
        return tree_leaves(given.compiled(backend, program)(*backend.put(given.arguments(), copy=True)))

    mine = [backends.Backend("mine", with_kernels(table), backends.InProcess(2), adversary=seed) for seed in (None, 1)]
    plain, hostile = map(found, mine)
    exact = found(backends.get("reference", ranks=2))
    for got, same, want in zip(plain, hostile, exact, strict=True):
        assert torch.equal(got, same)
        torch.testing.assert_close(got.double(), want, rtol=0.05, atol=0.05)


def test_float64_stays_with_the_table(generator):
    table = with_kernels(cpu.TABLE)
    parts = Parts(generator, (2, 3, 2, 4), torch.float64)
    given = [one.double() for one in (parts.recv, parts.recv_lse, parts.local, parts.local_lse)]
    (got,), (want,) = (one.rules[ops.Combine](*given, run=Run(0), flat=True) for one in (table, cpu.TABLE))
    assert torch.equal(got, want)


def test_cuda_takes_kernels_where_there_is_a_triton(monkeypatch):
    assert package.available()
    assert cuda.table().rules[ops.AllToAll].send is rules.send
    monkeypatch.setattr(package, "available", lambda: False)
    assert cuda.table() is cuda.TABLE


def test_ascend_may_choose_them():
    """The merge that its pass finds is then the kernel too."""
    from mla_fx.backends import ascend

    table = with_kernels(ascend.TABLE, merges=(MergeAttention,))
    assert table.rules[ops.AllToAll].send is rules.send and table.passes == ascend.TABLE.passes
    assert table.rules[MergeAttention] is table.rules[ops.Combine]
    assert not {ops.Combine, MergeAttention} & table.takes.keys()
