"""The engines for bf16 and the instructions they use: emulated on any machine, real where the processor has them."""

import ctypes
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from attrs import frozen

from mla_fx.backends import compiled

HERE = Path(__file__).resolve().parent
KERNEL = Path(compiled.__file__).resolve().parent / "cpu" / "kernel"
#: Without AVX-512: an intrinsic that emulated_simd.h has not got does not compile.
EMULATED = ("-DMLA_EMULATED", f"-I{HERE}", "-Wno-psabi", "-mavx2", "-mfma", "-mf16c")
REAL = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma", "-mf16c")
_COMMON = ("-std=c++17", "-O1", "-fPIC", "-fopenmp", "-fno-math-errno", "-fvisibility=hidden", f"-I{KERNEL}")


class _Counts(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("dots", "tile_dots", "tile_loads", "tile_stores", "exponentials")),
        *((name, ctypes.c_int64) for name in ("conversions", "broadcasts", "loads", "stores")),
    ]


@frozen
class Executed:
    """Instructions of the emulated processor, by name; `lines`, how often each 64 bytes of the watched were loaded."""

    counts: dict[str, int]
    lines: torch.Tensor


def executed(run: Callable[[], object], watched: torch.Tensor) -> Executed:
    """What the emulated engines execute while `run` calls them on one thread, and load of a tensor."""
    library, counts = engines(), _Counts()
    lines = torch.zeros(-(-watched.nbytes // 64), dtype=torch.int32)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    library.emulated_counts(ctypes.byref(counts))
    library.emulated_watch(
        ctypes.c_void_p(watched.data_ptr()), ctypes.c_long(watched.nbytes), ctypes.c_void_p(lines.data_ptr())
    )
    try:
        run()
    finally:
        library.emulated_watch(None, 0, None)
        library.emulated_counts(ctypes.byref(counts))
        torch.set_num_threads(before)
    return Executed({name: getattr(counts, name) for name, _ in counts._fields_}, lines)


def flags() -> set[str]:
    """What the processor here has, by the system's names for it."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    return next((set(line.split()) for line in text.splitlines() if line.startswith("flags")), set())


def why_not() -> str | None:
    """Why nothing can be emulated here."""
    if not {"avx2", "fma", "f16c"} <= flags():
        return "the processor has no AVX2"
    try:
        compiled.compiler("the emulated processor")
    except compiled.InputError as error:
        return str(error)
    return None


def probe(folder: Path, *, emulated: bool) -> ctypes.CDLL:
    """The functions of simd_probe.cpp, compiled into `folder`."""
    made = folder / f"probe-{emulated}.so"
    command = [compiled.compiler("the emulated processor"), *_COMMON, "-fvisibility=default", "-shared"]
    command += [*(EMULATED if emulated else REAL), str(HERE / "simd_probe.cpp"), "-o", str(made)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(made))


@cache
def engines() -> ctypes.CDLL:
    """The library of kernels with both engines emulated, kept where builds are kept."""
    sources = [path for folder in (HERE, KERNEL) for path in sorted(folder.iterdir()) if path.suffix in (".cpp", ".h")]
    words = [*_COMMON, *EMULATED, "-shared"]

    def make(folder: Path) -> None:
        command = [compiled.compiler("the emulated processor"), *words]
        compiled.run([*command, str(HERE / "emulated_engines.cpp"), "-o", str(folder / "engines.so")])

    folder = compiled.built(
        "emulated-engines", make, sources, words, what="the emulated processor", takes="some seconds"
    )
    return ctypes.CDLL(str(folder / "engines.so"))
