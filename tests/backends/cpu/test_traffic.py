"""What attention asks of memory beside what it must: little more than its keys once, whatever the number of heads.

No counter of the processor is needed: the kernels' own text is compiled so that
it plays its loads and stores through one cache (traffic.cpp), as large as the
processors' second ones.  What attention keeps for itself while it goes over the
keys goes through the same cache, and is counted where it falls out.
"""

import ctypes
from functools import cache
from pathlib import Path

import pytest
import torch

from mla_fx.backends import compiled
from mla_fx.backends.cpu import kernel
from tests.backends.cpu import simd
from tests.backends.cpu.test_kernel_attention import Case, hold

pytestmark = pytest.mark.skipif(simd.why_not() is not None, reason=str(simd.why_not()))
HERE = Path(__file__).resolve().parent
MIB = 1 << 20
_COMMON = ("-std=c++17", "-O1", "-fPIC", "-fopenmp", "-fno-math-errno", "-fvisibility=hidden", f"-I{simd.KERNEL}")
_COUNTED = {"fma8.cpp": ("-mavx2", "-mfma", "-mf16c"), "avx512_bf16.cpp": simd.EMULATED, "amx.cpp": simd.EMULATED}


@cache
def library() -> ctypes.CDLL:
    """The engines, of which those for bf16 over the emulated processor, all of whose loads and stores are counted."""
    sources = [
        path for folder in (HERE, simd.KERNEL) for path in sorted(folder.iterdir()) if path.suffix in (".cpp", ".h")
    ]

    def make(folder: Path) -> None:
        command = [compiled.compiler("traffic"), *_COMMON]
        objects = [str(folder / f"{name}.o") for name in (*_COUNTED, "traffic.cpp")]
        compiled.run(
            *(
                [*command, *flags, "-fsanitize=thread", "-c", str(simd.KERNEL / name), "-o", made]
                for (name, flags), made in zip(_COUNTED.items(), objects, strict=False)
            ),
            [*command, "-c", str(HERE / "traffic.cpp"), "-o", objects[-1]],
        )
        compiled.run([*command, "-shared", "-Wl,--wrap=memcpy", *objects, "-o", str(folder / "traffic.so")])

    texts = [*_COMMON, *(f"{name} {' '.join(flags)}" for name, flags in _COUNTED.items())]
    folder = compiled.built("traffic", make, sources, texts, what="what counts traffic", takes="some seconds")
    return ctypes.CDLL(str(folder / "traffic.so"))


def traffic(
    case: Case, monkeypatch: pytest.MonkeyPatch, engine: str = "fma", *, size: int = MIB, calls: int = 1
) -> float:
    """Bytes that so many calls on one thread have from memory, in parts of those of the keys; results are right."""
    found, before = library(), torch.get_num_threads()
    found.traffic.argtypes, found.traffic.restype = [ctypes.c_long], ctypes.c_long
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "engine", lambda: engine)
        patch.setattr(kernel, "library", lambda: found)
        patch.setattr(kernel, "function", kernel.function.__wrapped__)
        torch.set_num_threads(1)
        try:
            found.traffic(size)
            results = [case.history() for _ in range(calls)]
        finally:
            spent = found.traffic(0)
            torch.set_num_threads(before)
    hold(results[-1], case.exact())
    parts = spent / bytes_of_keys(case)
    print(f"{engine}, {case.heads} heads, {case.dtype}: {parts:.3f} of the keys")
    return parts


def bytes_of_keys(case: Case) -> int:
    return sum(case.keys) * (case.latent + case.rope) * case.dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [1, 7, 16, 128])
def test_keys_come_from_memory_once(heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(heads, (1,), (4096 if heads > 16 else 2048,), dtype, size=128)
    assert bytes_of_keys(case) > 2 * MIB
    assert 1 <= traffic(case, monkeypatch) <= 1.3


def test_several_requests_and_new_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a request go over its keys together."""
    assert 1 <= traffic(Case(16, (3, 1, 4), (900, 700, 1000), size=128), monkeypatch) <= 1.3


#: The least second cache of the processors that have an engine: Zen 4 and Cooper Lake; Sapphire Rapids.
SECOND = {"avx512_bf16": MIB, "amx": 2 * MIB}


@pytest.mark.parametrize("engine", SECOND)
@pytest.mark.parametrize("heads", [16, pytest.param(128, marks=pytest.mark.soak)])
def test_keys_come_once_for_16_bit_engines(heads: int, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (
        SECOND[engine] if heads == 128 else MIB
    )  # few heads hold in less, which an emulated processor is done with sooner
    case = Case(heads, (1,), (4096 if heads == 128 else 1024,), torch.bfloat16, size=128)
    assert bytes_of_keys(case) > size
    assert 1 <= traffic(case, monkeypatch, engine, size=size) <= 1.3


def test_what_comes_again_is_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when heads are taken in groups, each of which goes over all keys; and not where the cache holds them."""
    case = Case(8, (1,), (1024,), size=128)
    assert 4 <= traffic(case, monkeypatch, calls=4) <= 5
    assert 1 <= traffic(case, monkeypatch, calls=4, size=64 * MIB) <= 1.3
