"""The emulated AVX-512 and tile instructions against their definitions, written here once more in exact arithmetic.

Where the processor has the instructions, it is held to the same.
"""

import ctypes
import math
import random
import struct
from fractions import Fraction

import pytest
import torch

from tests.backends.cpu.simd import flags, probe, why_not

AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"} <= flags()
MACHINES = [
    "emulated",
    pytest.param("real", marks=pytest.mark.skipif(not AVX512, reason="the processor has no AVX-512 for bf16")),
]
#: Zeros, denormals, ones, halfway cases of bf16, the ends of the range, infinities, NaN: bits of float32.
SPECIAL = (
    *(0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x3F800000, 0xBF800000, 0x3F808000, 0x3F818000),
    *(0x3F807FFF, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7FA00001, 0x42280000),
)


@pytest.fixture(params=MACHINES, scope="module")
def simd(request, tmp_path_factory):
    if why_not() is not None:
        pytest.skip(str(why_not()))
    found = probe(tmp_path_factory.mktemp("simd"), emulated=request.param == "emulated")
    found.real = request.param == "real"
    return found


def value_of(word: int) -> float:
    return struct.unpack("<f", struct.pack("<I", word))[0]


def word_of(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def nearest(x: Fraction) -> float:
    """The float32 nearest to `x`, the even one of two; infinity beyond the largest."""
    if x == 0:
        return 0.0
    exponent = math.frexp(float(abs(x)))[1] if abs(x) > Fraction(1, 2**1000) else -1000
    quantum = Fraction(2) ** max(exponent - 24, -149)
    found = round(x / quantum) * quantum
    return math.copysign(math.inf, x) if abs(found) >= 2**128 else float(found)


def flushed(x: float) -> float:
    return math.copysign(0.0, x) if abs(x) < 2.0**-126 else x


def fused(a: float, b: float, c: float) -> float:
    """a b + c, rounded once."""
    if not all(map(math.isfinite, (a, b, c))):
        return a * b + c
    return nearest(Fraction(a) * Fraction(b) + Fraction(c))


def dot_step(a: float, b: float, c: float) -> float:
    return flushed(fused(flushed(a), flushed(b), flushed(c)))


def call(function, *operands: bytes) -> bytes:
    out = ctypes.create_string_buffer(64)
    function(*[*operands, b"", b"", b""][:3], out)
    return out.raw


def packed(values: list[float]) -> bytes:
    return struct.pack("<16f", *values)


def unpacked(raw: bytes) -> list[float]:
    return list(struct.unpack("<16f", raw))


def test_conversion_rounds_to_nearest_even_and_flushes(simd) -> None:
    rng = random.Random(2)
    for _ in range(40):
        a, b = ([rng.choice(SPECIAL) if rng.random() < 0.4 else rng.getrandbits(32) for _ in range(16)] for _ in "ab")
        raw = call(simd.cvtne2ps_pbh, struct.pack("<16I", *a), struct.pack("<16I", *b))
        for word, got in zip([*b, *a], struct.unpack("<32H", raw), strict=True):
            value = value_of(word)
            if value != value:
                assert got == word >> 16 | 0x40
            elif abs(value) < 2.0**-126:
                assert got == word >> 16 & 0x8000
            elif math.isinf(value):
                assert got == word >> 16
            else:
                quantum = Fraction(2) ** (math.frexp(value)[1] - 8)
                rounded = round(Fraction(value) / quantum) * quantum
                beyond = abs(rounded) >= 2**128
                assert value_of(got << 16) == (math.copysign(math.inf, value) if beyond else float(rounded))


def halves(rng: random.Random, count: int, spread: int = 30) -> list[int]:
    """Bits of `count` bf16: of sizes about 1, some denormal or 0."""
    some = [
        rng.getrandbits(1) << 15 | rng.randint(127 - spread, 127 + spread) << 7 | rng.getrandbits(7)
        for _ in range(count)
    ]
    return [rng.choice((0, 0x8000, 0x0001, 0x807F, 0x0080, 0x3F80)) if rng.random() < 0.2 else x for x in some]


def test_a_dot_of_pairs_takes_the_upper_product_first(simd) -> None:
    rng = random.Random(3)
    for turn in range(40):
        spread = 30 if turn % 2 else 63  # products that are denormal too
        a, b = halves(rng, 32, spread), halves(rng, 32, spread)
        sums = [value_of(word_of(rng.uniform(-2, 2) * 2.0 ** rng.randint(-130, 20))) for _ in range(16)]
        found = unpacked(call(simd.dpbf16_ps, packed(sums), struct.pack("<32H", *a), struct.pack("<32H", *b)))
        x, y = ([value_of(h << 16) for h in half] for half in (a, b))
        for i, got in enumerate(found):
            upper = dot_step(x[2 * i + 1], y[2 * i + 1], sums[i])
            assert got == dot_step(x[2 * i], y[2 * i], upper), (turn, i)


ORDERS = {
    "unpacklo_epi16": (
        "32H",
        lambda a, b: [v for at in range(0, 32, 8) for i in range(4) for v in (a[at + i], b[at + i])],
    ),
    "unpackhi_epi16": (
        "32H",
        lambda a, b: [v for at in range(4, 32, 8) for i in range(4) for v in (a[at + i], b[at + i])],
    ),
    "unpacklo_epi32": (
        "16I",
        lambda a, b: [v for at in range(0, 16, 4) for i in range(2) for v in (a[at + i], b[at + i])],
    ),
    "unpackhi_epi32": (
        "16I",
        lambda a, b: [v for at in range(2, 16, 4) for i in range(2) for v in (a[at + i], b[at + i])],
    ),
    "unpacklo_epi64": ("8Q", lambda a, b: [v for at in range(0, 8, 2) for v in (a[at], b[at])]),
    "unpackhi_epi64": ("8Q", lambda a, b: [v for at in range(1, 8, 2) for v in (a[at], b[at])]),
    "shuffle_even": ("16I", lambda a, b: [*a[0:4], *a[8:12], *b[0:4], *b[8:12]]),
    "shuffle_odd": ("16I", lambda a, b: [*a[4:8], *a[12:16], *b[4:8], *b[12:16]]),
}


@pytest.mark.parametrize("name", ORDERS)
def test_orders(simd, name: str) -> None:
    rng, (form, order) = random.Random(name), ORDERS[name]
    for _ in range(5):
        a, b = rng.randbytes(64), rng.randbytes(64)
        expected = order(*(list(struct.unpack(f"<{form}", raw)) for raw in (a, b)))
        assert list(struct.unpack(f"<{form}", call(getattr(simd, name), a, b))) == expected


def test_permutation_of_two(simd) -> None:
    rng = random.Random(4)
    a, b, index = rng.randbytes(64), rng.randbytes(64), [rng.getrandbits(8) for _ in range(16)]
    both = [*struct.unpack("<16I", a), *struct.unpack("<16I", b)]
    found = struct.unpack("<16I", call(simd.permutex2var_ps, a, struct.pack("<16I", *index), b))
    assert list(found) == [both[i & 31] for i in index]


def same(found: float, right: float) -> bool:
    """Bit for bit, but for which NaN it is."""
    return word_of(found) == word_of(right) or (found != found and right != right)


def test_the_larger_is_the_second_where_neither_is(simd) -> None:
    rng = random.Random(6)
    for _ in range(20):
        a, b = ([value_of(rng.choice(SPECIAL)) for _ in range(16)] for _ in "ab")
        found = unpacked(call(simd.max_ps, packed(a), packed(b)))
        assert all(same(got, x if x > y else y) for got, x, y in zip(found, a, b, strict=True))


def test_what_is_left_of_a_number_beside_its_floor(simd) -> None:
    rng = random.Random(7)
    for _ in range(20):
        a = [rng.uniform(-2, 2) * 2.0 ** rng.randint(-30, 30) for _ in range(13)]
        values = [value_of(word_of(x)) for x in a] + [math.inf, -math.inf, math.nan]
        found = unpacked(call(simd.reduce_ps, packed(values)))
        exact = [nearest(Fraction(x) - math.floor(x)) for x in values[:13]]
        assert found[:13] == exact and list(map(abs, found[13:15])) == [0, 0] and found[15] != found[15]


def test_scaling_by_a_power_that_is_rounded_down(simd) -> None:
    rng = random.Random(8)
    for _ in range(20):
        a = [value_of(word_of(rng.uniform(0.5, 2))) for _ in range(16)]
        b = [value_of(word_of(rng.uniform(-200, 200))) for _ in range(12)] + [-math.inf, -1e30, math.nan, 0.0]
        found = unpacked(call(simd.scalef_ps, packed(a), packed(b)))
        exact = [nearest(Fraction(x) * Fraction(2) ** math.floor(y)) for x, y in zip(a[:12], b[:12], strict=True)]
        assert found[:12] == exact and found[12:14] == [0, 0] and found[14] != found[14] and found[15] == a[15]


def test_constants(simd) -> None:
    assert struct.unpack("<16i", call(simd.set1_epi32, struct.pack("<i", -7))) == (-7,) * 16
    assert call(simd.setzero_si512) == bytes(64)


def test_fp16_is_converted_as_by_torch(simd) -> None:
    rng = random.Random(5)
    raw = struct.pack("<16H", *(rng.getrandbits(16) for _ in range(16)))
    wide = torch.frombuffer(bytearray(raw), dtype=torch.float16).float()
    found = torch.tensor(unpacked(call(simd.cvtph_ps, raw + bytes(32))))
    assert torch.equal(found, wide) or torch.equal(found.isnan(), wide.isnan())
    values = [rng.uniform(-3, 3) * 2.0 ** rng.randint(-26, 16) for _ in range(16)]
    narrow = torch.frombuffer(bytearray(call(simd.cvtps_ph, packed(values))), dtype=torch.float16)
    assert torch.equal(narrow, torch.tensor(values).half().repeat(2))


@pytest.mark.parametrize(("rows", "pairs", "columns"), [(16, 16, 16), (1, 16, 16), (16, 3, 5), (7, 1, 16)])
def test_a_dot_of_tiles_sums_even_and_odd_apart(simd, rows: int, pairs: int, columns: int) -> None:
    if simd.real:
        if "amx_bf16" not in flags():
            pytest.skip("the processor has no tiles")
        ctypes.CDLL(None).syscall(158, 0x1023, 18)  # arch_prctl: ask for them
    rng = random.Random(f"{rows} {pairs} {columns}")
    a, b = halves(rng, rows * pairs * 2), halves(rng, pairs * columns * 2)
    c = [value_of(word_of(rng.uniform(-2, 2) * 2.0 ** rng.choice((-128, 0, 20)))) for _ in range(rows * columns)]
    out = ctypes.create_string_buffer(struct.pack(f"<{len(c)}f", *c), 4 * len(c))
    simd.tdpbf16ps(struct.pack(f"<{len(a)}H", *a), struct.pack(f"<{len(b)}H", *b), out, rows, pairs, columns)
    x, y = ([value_of(h << 16) for h in half] for half in (a, b))
    for at, got in enumerate(struct.unpack(f"<{len(c)}f", out.raw)):
        m, n = divmod(at, columns)
        even = odd = 0.0
        for k in range(pairs):
            even = dot_step(x[(m * pairs + k) * 2], y[(k * columns + n) * 2], even)
            odd = dot_step(x[(m * pairs + k) * 2 + 1], y[(k * columns + n) * 2 + 1], odd)
        assert got == dot_step(dot_step(even, 1.0, odd), 1.0, c[at]), (m, n)
