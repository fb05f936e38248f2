"""Compiled kernels of the CPU backend: one library, built on first use, whose engine is chosen when it is loaded.

Each file of C++ is compiled by itself with the instructions that it may use,
and called only where the processor has them.  Without a compiler, or on
another processor, there is no library, and rules take their plain torch form.

| engine | products | needs |
|---|---|---|
| amx | bf16 pairs, in tiles | AMX for bf16, beside the next |
| avx512_bf16 | bf16 pairs, 16 lanes | AVX-512 with its dot product of bf16 |
| fma | float32, 8 or 16 lanes | AVX2, FMA and F16C, or AVX-512 |

The first two serve bf16 whose features are multiples of 32, and leave the rest
to the last.  They are tested over an emulated processor on any machine
(`tests/backends/cpu/test_engines.py`); their speed was not measured.

`MLA_FX_CPU_ENGINE` names a lower one than the processor has, or "torch" for
the plain form.
"""

if __name__ != "mla_fx.backends.cpu.kernel":  # reached as a top-level name from the checkout
    raise ImportError(f"import this package as 'mla_fx.backends.cpu.kernel', not {__name__!r}")

import ctypes
import os
import platform
import struct
import warnings
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from attrs import frozen

from mla_fx.backends import compiled
from mla_fx.backends.several import Several
from mla_fx.effects import InputError

WHAT: Final = "the library of kernels of the CPU backend"
#: Engines from the fastest on, and the bit that says in the library that the processor has one.
ENGINES: Final = {"amx": 4, "avx512_bf16": 2, "fma": 1}
#: The library's numbers of activations' dtypes: `Format` in formats.h.
FORMATS: Final = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
CHOICE: Final = "MLA_FX_CPU_ENGINE"

_HERE = Path(__file__).resolve().parent
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fopenmp", "-fno-math-errno", "-ffp-contract=fast", "-fvisibility=hidden")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c")
#: What is compiled, and for which instructions.
_UNITS: Final[dict[str, tuple[str, ...]]] = {
    "entry.cpp": (),
    "fma8.cpp": ("-mavx2", "-mfma", "-mf16c"),
    "fma16.cpp": _AVX512,
    "avx512_bf16.cpp": (*_AVX512, "-mavx512bf16"),
    "amx.cpp": (*_AVX512, "-mavx512bf16"),  # the tiles' instructions are written out
    "linear.cpp": ("-mavx2", "-mfma", "-mf16c"),
    "linear_512.cpp": _AVX512,
    "pointwise.cpp": ("-O3", "-fno-trapping-math", "-mavx2", "-mfma", "-mf16c"),  # or a choice is a jump
}


@cache
def library() -> ctypes.CDLL | None:
    """The library, compiled unless it is in the cache; None where it cannot be had, which is said once.

    torch is loaded before it, so both have one OpenMP, torch's.
    """
    if platform.machine() not in ("x86_64", "AMD64") or os.name != "posix":
        return None
    texts = [*_FLAGS, *(f"{name} {' '.join(flags)}" for name, flags in _UNITS.items()), torch.__version__]
    try:
        folder = compiled.built("cpu-kernels", _compile, _sources(), texts, what=WHAT, takes="about half a minute")
        return ctypes.CDLL(str(folder / "kernels.so"))
    except (InputError, OSError) as error:
        said = str(error).splitlines()[0]
        warnings.warn(f"mla_fx computes on the CPU by plain torch, several times slower: {said}", stacklevel=2)
        return None


@cache
def engine() -> str | None:
    """The engine of this process, None for the plain torch form; raises `InputError` for a choice that there is not."""
    choice = os.environ.get(CHOICE) or None
    if choice == "torch":
        return None
    if choice is not None and choice not in ENGINES:
        raise InputError(f"{CHOICE}: must be one of {', '.join(ENGINES)}, torch: got {choice!r}")
    found = library()
    has = found.mla_fx_engines() if found is not None else 0
    there = [name for name, bit in ENGINES.items() if has & bit]
    if choice is not None and choice not in there:
        raise InputError(f"{CHOICE}: must be one of what there is here, {', '.join([*there, 'torch'])}: got {choice!r}")
    return choice or next(iter(there), None)


#: One for each of the ranks that a call is for.
Tensors = Sequence[torch.Tensor]


@frozen(eq=False)
class Function:
    """A function of the library, called for several ranks at once."""

    found: Callable[[int, bytes, bytes, bytes | None], int]
    numbers: struct.Struct

    def __call__(self, own: Sequence[Sequence[Any]], *numbers: float) -> tuple[int, int] | None:
        """`own`: of each argument that is a rank's own, one for every rank: a tensor for its memory, or an integer.

        `numbers` are the others, the same for all; both in the order of the function's arguments.  Gives what the
        function refuses: its number, and the place of the rank among these; None where it has done everything.
        """
        ranks, packed = len(own[0]), self.numbers.pack(*numbers)
        if ranks == 1:
            words = [one if type(one) is int else one.data_ptr() for (one,) in own]
            refused = self.found(1, packed, array("q", words).tobytes(), None)
        else:
            several = [Several.of(one) for one in own]  # which hold the lists of addresses until the call is over
            firsts, steps = zip(*[one.lies for one in several], strict=True)
            refused = self.found(ranks, packed, array("q", firsts).tobytes(), array("q", steps).tobytes())
        return None if refused < 0 else divmod(refused, ranks)


@cache
def function(name: str, numbers: str) -> Function:
    """A function of the library whose numbers are of such types: i an integer, f a float."""
    found = getattr(library(), f"{name}_each")
    found.argtypes, found.restype = [ctypes.c_int64, *[ctypes.c_char_p] * 3], ctypes.c_int64
    return Function(found, struct.Struct("<" + "".join({"i": "q", "f": "f4x"}[one] for one in numbers)))


def room(like: Tensors, *shape: int, dtype: torch.dtype | None = None) -> Tensors:
    """Memory for a result of each rank, as many as `like`, whose dtype it has unless another is given."""
    if len(like) == 1:
        return (like[0].new_empty(*shape, dtype=dtype),)  # sizes one by one: a tuple takes half as long again
    return Several.empty(len(like), shape, dtype or like[0].dtype)


def _sources() -> list[Path]:
    return sorted(path for path in _HERE.iterdir() if path.suffix in (".cpp", ".h"))


def _compile(folder: Path) -> None:
    """Each unit by itself, side by side, then all together."""
    command = [compiled.compiler(WHAT), *_FLAGS]
    objects = {name: str(folder / f"{name}.o") for name in _UNITS}
    compiled.run(
        *([*command, *_UNITS[name], "-c", str(_HERE / name), "-o", made] for name, made in objects.items()),
    )
    compiled.run([*command, "-shared", *objects.values(), "-o", str(folder / "kernels.so")])
    for made in objects.values():
        Path(made).unlink()
