"""The engines for bf16 and the instructions they use: emulated on any machine, real where the processor has them."""

import ctypes
import subprocess
from functools import cache
from pathlib import Path

from mla_fx.backends import compiled

HERE = Path(__file__).resolve().parent
KERNEL = Path(compiled.__file__).resolve().parent / "cpu" / "kernel"
#: Without AVX-512: an intrinsic that emulated_simd.h has not got does not compile.
EMULATED = ("-DMLA_EMULATED", f"-I{HERE}", "-Wno-psabi", "-mavx2", "-mfma", "-mf16c")
REAL = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma", "-mf16c")
_COMMON = ("-std=c++17", "-O1", "-fPIC", "-fopenmp", "-fno-math-errno", "-fvisibility=hidden", f"-I{KERNEL}")


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
