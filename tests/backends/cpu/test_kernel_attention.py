"""The compiled attention against its definition in float64: a softmax over keys that the test has laid out itself.

All that lengths do not reach is NaN, and blocks lie anywhere.  The rules' own tests are in `tests/ops`.
"""

import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from attrs import define, field

from mla_fx import backends, orchestrations
from mla_fx.backends.cpu import history_attention, kernel
from mla_fx.backends.cpu.kernel import attention
from mla_fx.effects import InputError, schedule
from tests.setups import Setup

pytestmark = pytest.mark.skipif(kernel.engine() is None, reason="no kernel here")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Largest error of an output in parts of the largest output.
ERRORS = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}
SCALE = 192**-0.5


def of_one(attend: Any, *operands: Any, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """What a single rank is given."""
    (out,), (lse,) = attend(*[(one,) for one in operands], scale)
    return out, lse


@define(eq=False, slots=False)
class Case:
    """Requests with `queries[b]` new tokens and `keys[b]` cached ones, in blocks of `size`; one token is padding."""

    heads: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    size: int = 16
    latent: int = 512
    rope: int = 64
    parts: list[tuple[torch.Tensor, torch.Tensor]] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        draw = torch.Generator().manual_seed(sum(self.keys) + self.heads)

        def random(*shape: int, size: float = 1) -> torch.Tensor:
            return torch.randn(shape, generator=draw).mul_(size).to(self.dtype)

        need = [-(-keys // self.size) for keys in self.keys]
        order = iter(torch.randperm(sum(need) + 1, generator=draw).tolist())
        shape = (sum(need) + 1, self.size)
        self.caches = [torch.full((*shape, n), math.nan, dtype=self.dtype) for n in (self.latent, self.rope)]
        self.table = torch.full((len(need), max(need, default=0) + 1), 2**30, dtype=torch.int32)
        tokens = sum(self.queries) + 1
        self.q = [random(tokens, self.heads, n) for n in (self.latent, self.rope)]
        self.new = [random(tokens, n, size=0.3) for n in (self.latent, self.rope)]
        for tensor in (*self.q, *self.new):
            tensor[-1] = math.nan
        for b, keys in enumerate(self.keys):
            part = random(keys, self.latent, size=0.3), random(keys, self.rope, size=0.3)
            self.parts.append(part)
            for j in range(need[b]):
                self.table[b, j] = block = next(order)
                for cache, rows in zip(self.caches, part, strict=True):
                    some = rows[j * self.size : (j + 1) * self.size]
                    cache[block, : len(some)] = some

    def history(self, scale: float = SCALE) -> tuple[torch.Tensor, torch.Tensor]:
        operands = *self.q, *self.caches, self.table, self.queries, self.keys
        return of_one(attention.history, *operands, scale=scale)

    def current(self) -> tuple[torch.Tensor, torch.Tensor]:
        return of_one(attention.current, *self.q, *self.new, self.queries, scale=SCALE)

    def exact(self, scale: float = SCALE, current: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.zeros(self.q[0].shape, dtype=torch.float64)
        lse = torch.full(out.shape[:2], -math.inf, dtype=torch.float64)
        request = [(b, i) for b, new in enumerate(self.queries) for i in range(new)]
        for t, (b, i) in enumerate(request):
            c, r = (part[t - i : t + 1] for part in self.new) if current else self.parts[b]
            if len(c):
                scores = scale * (self.q[0][t].double() @ c.double().T + self.q[1][t].double() @ r.double().T)
                out[t], lse[t] = scores.softmax(1) @ c.double(), scores.logsumexp(1)
        return out, lse


def hold(found: tuple[torch.Tensor, torch.Tensor], right: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Errors as they are allowed; a row without a key is exact."""
    (out, lse), (exact, exact_lse) = found, right
    assert out.dtype in DTYPES and lse.dtype == torch.float32 and out.is_contiguous() and lse.is_contiguous()
    seen = exact_lse.isfinite()
    assert torch.equal(lse.isfinite(), seen) and torch.equal(out[~seen].double(), exact[~seen])
    if seen.any():
        error = (out.double() - exact).abs().max() / exact.abs().max()
        assert error <= ERRORS[out.dtype], f"output: {error:.1e} of the largest"
        assert ((lse.double() - exact_lse)[seen].abs() <= 2e-6 + 3e-7 * exact_lse[seen].abs()).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [1, 3, 7, 8, 20, 128])
def test_history(dtype: torch.dtype, heads: int) -> None:
    """One and several new tokens, mixed lengths, some of them 0; tiles that are full and that are not."""
    case = Case(heads, (1, 2, 0, 1, 1), (97, 5, 9, 0, 192), dtype)
    hold(case.history(), case.exact())


#: 64 requests: no key, one, what mixed lengths have, and all about a tile of one engine or another.
MANY = (0, 1, 4000, 100, 1700, 700, *range(62, 67), *range(70, 75), *range(94, 99), *range(190, 195), *range(254, 259))
MANY += tuple(range(2, 2 + 64 - len(MANY)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [1, 8, 16])
def test_many_requests_of_mixed_lengths(dtype: torch.dtype, heads: int) -> None:
    case = Case(heads, (1,) * len(MANY), MANY, dtype, size=32, latent=64, rope=32)
    assert len(MANY) == 64
    hold(case.history(), case.exact())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("latent", "rope"), [(6, 4), (1, 1), (32, 8), (128, 24), (40, 3)])
def test_any_features(dtype: torch.dtype, latent: int, rope: int) -> None:
    for heads in (1, 9):
        case = Case(heads, (2, 1), (17, 100), dtype, latent=latent, rope=rope)
        hold(case.history(), case.exact())
        hold(case.current(), case.exact(current=True))


@pytest.mark.parametrize("size", [1, 3, 100, 128, 256])
@pytest.mark.parametrize("heads", [2, 24])
def test_blocks_of_any_size(size: int, heads: int) -> None:
    case = Case(heads, (1, 1), (300, 211), torch.bfloat16, size=size)
    hold(case.history(), case.exact())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [1, 3, 16])
@pytest.mark.parametrize("queries", [(1, 1, 1), (3, 0, 1, 2), (19,)], ids=str)
def test_current(dtype: torch.dtype, heads: int, queries: tuple[int, ...]) -> None:
    """A token sees its own request's tokens up to itself."""
    case = Case(heads, queries, (0,) * len(queries), dtype)
    hold(case.current(), case.exact(current=True))


@pytest.mark.parametrize("way", ["kernel", "plain"])
@pytest.mark.parametrize(
    ("table", "keys", "got"),
    [
        ([[0, 1, 2], [3, -1, 9]], 20, r"\[3, -1, 9\]"),
        ([[0, 1, 2], [5, 4, 9]], 20, r"\[5, 4, 9\]"),
        ([[0, 1, 2], [3, 10**8, 9]], 20, r"\[3, 100000000, 9\]"),
        ([[0, 1, 2], [3, 4, 0]], 49, r"\[3, 4, 0\]"),
    ],
    ids=["before", "behind", "far behind", "too few"],
)
def test_blocks_that_are_not_in_the_cache_are_refused(table: list[list[int]], keys: int, got: str, way: str) -> None:
    """Memory that is not the cache's is not read; what lengths do not reach may name any block."""
    case = Case(4, (1, 1), (33, 20))
    case.caches = [cache[:5] for cache in case.caches]
    case.table, case.keys = torch.tensor(table, dtype=torch.int32), (33, keys)
    message = rf"block_table\[1\]: must name blocks in 0\.\.4 for each of {keys} keys: got {got}"
    with pytest.raises(InputError, match=message):
        if way == "kernel":
            case.history()
        else:
            history_attention.plain(*case.q, *case.caches, case.table, case.queries, case.keys, scale=SCALE)


def test_more_new_tokens_than_there_are_are_refused() -> None:
    case = Case(4, (1, 1), (3, 20))
    case.queries = (1, 3)
    with pytest.raises(InputError, match=r"query_lengths: must be of 3 tokens in all: got \[1, 3\]"):
        case.history()
    with pytest.raises(InputError, match=r"query_lengths: must be of 3 tokens in all: got \[1, 3\]"):
        case.current()


def test_a_table_without_blocks() -> None:
    """Where no request has a history, the table may have no column, and so no memory: rows have no key."""
    case = Case(4, (2, 1), (0, 0))
    case.table = case.table[:, :0]
    hold(case.history(), case.exact())


def test_more_tokens_than_a_tile() -> None:
    """And more rows than are handled together."""
    case = Case(3, (1, 150), (0, 0), latent=32, rope=8)
    hold(case.current(), case.exact(current=True))


def test_more_keys_than_a_chunk() -> None:
    """Chunks of a request are merged: with 2 heads and with 64 they are of 1024 and 4096 keys."""
    for heads, keys in ((2, 2500), (64, 4200)):
        case = Case(heads, (1,), (keys,), latent=32, rope=8)
        hold(case.history(), case.exact())


@pytest.mark.parametrize("heads", [2, 16, 130])
def test_bits_are_the_same_for_any_threads_and_batch(heads: int) -> None:
    """One thread or several, alone or beside others, whatever is cut."""
    case = Case(heads, (1, 3, 1), (2300, 700, 4200), latent=128, rope=8)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            found.append((*case.history(), *case.current()))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, other[:2], found[0][:2])) and all(map(torch.equal, other[2:], found[0][2:]))
    rows, tables = slice(1, 4), case.table[1:2]
    alone = of_one(attention.history, *(q[rows] for q in case.q), *case.caches, tables, (3,), (700,), scale=SCALE)
    assert torch.equal(alone[0], found[0][0][rows]) and torch.equal(alone[1], found[0][1][rows])


@pytest.mark.parametrize("heads", [2, 16])
def test_scores_in_the_tens_of_thousands(heads: int) -> None:
    """From tile to tile they rise and fall by more than an exponential can hold."""
    case = Case(heads, (1,), (300,))
    out, lse = case.history(1000.0)
    right = case.exact(1000.0)[1][0]
    assert out[0].isfinite().all() and right.abs().max() > 9000
    assert ((lse[0].double() - right).abs() <= 2e-6 * right.abs()).all()


@pytest.mark.parametrize("heads", [2, 16])
def test_nan_in_a_key_that_is_seen_is_seen(heads: int) -> None:
    case = Case(heads, (1, 1), (300, 30))
    case.caches[0][case.table[0, 9], 3, 7] = math.nan
    out, lse = case.history()
    assert out[0].isnan().all() and lse[0].isnan().all()
    assert out[1].isfinite().all() and lse[1].isfinite().all()


def test_a_key_counts_as_much_as_it_does() -> None:
    """2^0 is 1: equal scores over many tiles give the logarithm of their number."""
    case = Case(16, (1,), (4096,), latent=32, rope=8)
    for q in case.q:
        q.zero_()
    _, lse = case.history()
    assert (lse[0].double() - math.log(4096)).abs().max() <= 1e-6


def test_caches_with_strides() -> None:
    """A cache of latent and rope beside each other, of which each has a view."""
    case = Case(16, (2,), (100,), torch.bfloat16)
    right = case.history()
    both = torch.cat(case.caches, 2)
    case.caches = [both[..., :512], both[..., 512:]]
    case.q = [q.transpose(0, 1).contiguous().transpose(0, 1) for q in case.q]
    assert all(map(torch.equal, case.history(), right))


def test_the_hostile_machine_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is NaN until written and handed on as early as the law allows: the bits are those of a plain run."""
    asked: list[str] = []
    for name in ("history", "current"):
        function = getattr(attention, name)
        monkeypatch.setattr(attention, name, lambda *given, f=function, n=name: asked.append(n) or f(*given))
    setup = Setup(ranks=2, dtype="bf16")
    program = schedule(setup.step, orchestrations.attention_aside)

    def outs(seed: int | None) -> list[torch.Tensor]:
        out, _ = setup.compiled(backends.get("cpu", ranks=2, adversary=seed), program)(*setup.arguments())
        return out

    plain = outs(None)
    for seed in range(4):
        asked.clear()
        assert all(map(torch.equal, outs(seed), plain)) and plain[0].isfinite().all()
        assert sorted(asked) == ["current"] * 2 + ["history"] * 2


def test_after_a_fork() -> None:
    """A child has none of the threads that its parent had."""
    code = """
import os, torch
from tests.backends.cpu.test_kernel_attention import Case
case = Case(16, (1,), (3000,), latent=64, rope=8)
torch.set_num_threads(2)
right = case.history()
child = os.fork()
if not child:
    os._exit(0 if torch.equal(case.history()[0], right[0]) else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )
    assert done.stdout == "0\n", done.stderr
