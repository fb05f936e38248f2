"""The engines in registers of 512 bits, over an emulated processor and where it has them over this one.

They are held against float64.  The emulated processor is `emulated_simd.h`, which has a test of its own.  Speed is not
shown here.
"""

import ctypes
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from mla_fx.backends.cpu import kernel
from mla_fx.effects import InputError
from tests.backends.cpu import simd
from tests.backends.cpu.test_kernel_attention import DTYPES, MANY, Case, hold

ENGINES = ("avx512_bf16", "amx")
LIBRARY = kernel.library()
HERE = [name for name in ENGINES if LIBRARY is not None and LIBRARY.mla_fx_engines() & kernel.ENGINES[name]]
pytestmark = pytest.mark.skipif(simd.why_not() is not None, reason=str(simd.why_not()))


@pytest.fixture(params=[*(f"emulated {name}" for name in ENGINES), *HERE])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Calls of `attention` go to this engine."""
    *emulated, name = request.param.split()
    monkeypatch.setattr(kernel, "engine", lambda: name)
    if emulated:
        monkeypatch.setattr(kernel, "library", simd.engines)
        monkeypatch.setattr(kernel, "function", kernel.function.__wrapped__)
    yield request.param
    if emulated:
        assert simd.engines().emulated_tiles() == 0, "tiles must be given back"


def both(case: Case) -> None:
    hold(case.history(), case.exact())
    hold(case.current(), case.exact(current=True))


@pytest.mark.parametrize("heads", [8, 16, 20, 40, 128])
def test_heads(engine: str, heads: int) -> None:
    """Panels of 16 and 32 rows, full and not; requests without keys or tokens; lengths about a tile."""
    both(Case(heads, (1, 1, 0, 1), (33, 0, 9, 257), torch.bfloat16, size=32, latent=64, rope=32))


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 7, 8])
def test_few_rows(engine: str, heads: int) -> None:
    """Those of all sizes that are multiplied together, alone and as several tokens; lengths about a tile, and odd."""
    both(Case(heads, (1, 1, 0, 1, 2), (33, 0, 9, 64, 1), torch.bfloat16, size=32, latent=128, rope=32))


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy behind which no memory can be read: who does is killed."""
    room = -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    area = mmap.mmap(-1, room + mmap.PAGESIZE)
    behind = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(area)) + room)
    assert ctypes.CDLL(None).mprotect(behind, mmap.PAGESIZE, 0) == 0
    rows = torch.frombuffer(area, dtype=tensor.dtype, count=tensor.numel(), offset=room - tensor.nbytes)
    return rows.view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize(("heads", "tokens"), [(1, 1), (1, 7), (8, 1), (8, 31), (8, 33)])
def test_nothing_behind_the_operands_is_read(engine: str, heads: int, tokens: int) -> None:
    case = Case(heads, (tokens,), (70,), torch.bfloat16, size=35, latent=128, rope=32)
    case.q, case.caches = [guarded(q) for q in case.q], [guarded(cache) for cache in case.caches]
    case.new = [guarded(new[:-1]) for new in case.new]
    both(case)


@pytest.mark.parametrize("size", [1, 3, 16, 96, 100, 512])
def test_blocks_of_any_size(engine: str, size: int) -> None:
    both(Case(9, (1, 2), (300, 70), torch.bfloat16, size=size, latent=96, rope=32))


def test_many_requests_of_mixed_lengths(engine: str) -> None:
    case = Case(8, (1,) * len(MANY), MANY, torch.bfloat16, size=32, latent=64, rope=32)
    hold(case.history(), case.exact())


def test_sizes_of_deepseek_v3(engine: str) -> None:
    """Several new tokens, more rows than are handled together."""
    both(Case(16, (9, 1), (130, 40), torch.bfloat16, size=128))


def test_chunks_and_threads(engine: str) -> None:
    """A history that is cut and merged gives the same bits on one thread and on three."""
    case = Case(12, (1, 1), (2500, 90), torch.bfloat16, size=64, latent=32, rope=32)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(case.history())
    finally:
        torch.set_num_threads(before)
    hold(found[0], case.exact())
    assert all(map(torch.equal, *found))


def test_scores_that_rise_and_fall(engine: str) -> None:
    """By more than an exponential holds, from tile to tile."""
    case = Case(16, (1,), (600,), torch.bfloat16, size=64, latent=32, rope=32)
    hold(case.history(100.0), case.exact(100.0))


def test_many_equal_keys_count_as_many(engine: str) -> None:
    case = Case(16, (1,), (4096,), torch.bfloat16, size=128, latent=32, rope=32)
    for q in case.q:
        q.zero_()
    hold(case.history(), case.exact())


def test_other_operands_go_to_the_other_engine(engine: str) -> None:
    """Features that are no multiples of 32, and other dtypes."""
    for case in (
        Case(9, (1,), (5,), torch.bfloat16, latent=40, rope=32),
        Case(9, (1,), (5,), torch.bfloat16, latent=32, rope=8),
        Case(9, (1,), (5,), torch.float16, latent=32, rope=32),
        Case(9, (1,), (5,), torch.float32, latent=32, rope=32),
    ):
        if engine.startswith("emulated"):
            done = simd.executed(case.history, case.q[0]).counts
            assert done["exponentials"] and not done["dots"] + done["tile_dots"]
        hold(case.history(), case.exact())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "latent", "rope"), [(1, 128, 32), (7, 256, 64), (9, 40, 3), (40, 72, 32)])
def test_sixteen_lanes(heads: int, latent: int, rope: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine for every dtype in registers of 512 bits: few rows, and more than a panel; features of any number."""
    monkeypatch.setattr(kernel, "engine", lambda: "fma")
    monkeypatch.setattr(kernel, "library", simd.engines)
    monkeypatch.setattr(kernel, "function", kernel.function.__wrapped__)
    case = Case(heads, (1, 2, 0, 1), (33, 0, 9, 130), dtype, size=48, latent=latent, rope=rope)
    assert simd.executed(case.history, case.q[0]).counts["exponentials"]
    both(case)


@pytest.mark.parametrize("name", HERE)
def test_the_real_engine_agrees_with_the_emulated_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, found = Case(40, (1, 2), (700, 80), torch.bfloat16, size=64), []
    for library in (kernel.library, simd.engines):
        with monkeypatch.context() as patch:
            patch.setattr(kernel, "engine", lambda: name)
            patch.setattr(kernel, "library", library)
            patch.setattr(kernel, "function", kernel.function.__wrapped__)
            found.append(case.history())
    (out, lse), (emulated, emulated_lse) = found
    assert (lse - emulated_lse)[:-1].abs().max() <= 1e-6
    assert ((out - emulated).float().abs() <= 2**-7 * emulated.float().abs() + 1e-6)[:-1].all()


@pytest.mark.skipif(LIBRARY is None or shutil.which("nm") is None, reason="no library, or no nm to look into it")
def test_units_share_no_function() -> None:
    """Each is compiled for other instructions: what two have in common the linker would take from either.

    Nor may one but entry.cpp run anything when the library is loaded, on whatever processor.
    """
    listing = subprocess.run(["nm", "-C", LIBRARY._name], capture_output=True, text=True, check=True).stdout
    functions = {line[19:].split(" [")[0] for line in listing.splitlines() if line[17] in "tTwWiu" and line[0] != " "}
    own = {name for name in functions if "anonymous namespace" not in name}
    expected = {f"attend_{unit}(Call const&)" for unit in ("fma8", "fma16", "avx512_bf16", "amx")}
    runtime = {"_init", "_fini", "frame_dummy", "register_tm_clones", "deregister_tm_clones", "__do_global_dtors_aux"}
    runtime |= {name for name in own if "cpu_" in name or name.startswith(("get_available", "__cpu"))}
    exported = {name for name in own if name.startswith("mla_fx_")}  # two of a name would not be linked
    assert own - runtime - exported == {"_GLOBAL__sub_I_entry.cpp", "allowed(int)", *expected}


CHOICES = [(0, None), (1, "fma"), (3, "avx512_bf16"), (7, "amx")]


@pytest.mark.parametrize(("bits", "best"), CHOICES)
def test_the_fastest_engine_that_the_processor_has_is_chosen(bits: int, best: str | None, monkeypatch) -> None:
    """A lower one is taken where it is named; one that is not there is refused, by name and before anything runs."""
    monkeypatch.setattr(kernel, "library", lambda: SimpleNamespace(mla_fx_engines=lambda: bits))
    choose = kernel.engine.__wrapped__
    monkeypatch.delenv(kernel.CHOICE, raising=False)
    assert choose() == best
    for name, bit in kernel.ENGINES.items():
        monkeypatch.setenv(kernel.CHOICE, name)
        if bits & bit:
            assert choose() == name
        else:
            with pytest.raises(InputError, match=f"^{kernel.CHOICE}: must be one of .*: got '{name}'$"):
                choose()
    monkeypatch.setenv(kernel.CHOICE, "torch")
    assert choose() is None


def test_an_engine_that_is_not_here_is_refused_in_a_process_of_its_own() -> None:
    """Not by an illegal instruction in the middle of a step."""
    if "amx" in HERE or LIBRARY is None:
        pytest.skip("the processor has all engines, or there is no library")
    code = "from mla_fx.backends.cpu import kernel; kernel.engine()"
    environment = {**os.environ, kernel.CHOICE: "amx"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and f"{kernel.CHOICE}: must be one of" in done.stderr, done.stderr
