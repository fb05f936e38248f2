"""The emulated CANN libraries, compiled on first use into a cache.

Decided here: what is built, and from what; `mla_fx.backends.compiled` keeps it.
The wheel links to nine libraries by name.  `libascendcl.so` is the runtime,
`libopapi.so` the operators' entry points, `libhccl.so` the collectives; the
others are empty and only satisfy the loader.  What the wheel asks for and none
of the sources here defines is a weak function that returns 0, so that a call
which matters and is missing shows at that call.

Every operator that the wheel can ask for has an entry point, emulated or not:
where one were missing, the wheel would take an older way, and fail far from the call.
"""

import importlib.machinery
import importlib.metadata
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from mla_fx.backends import compiled
from mla_fx.backends.ascend.emulator.trampolines import assembly
from mla_fx.effects import InputError

_HERE = Path(__file__).parent
_SOURCES = (
    *("device.h", "device.cpp", "capture.h", "graph.h", "capture.cpp", "replay.cpp"),
    *("runtime.cpp", "descriptors.cpp", "hccl.cpp"),
)
#: As it is called where it is compiled.
WHAT: Final = "the emulated CANN"
#: The wheel that is emulated under.
WHEEL: Final = "2.13.0"
#: In the order in which they must be loaded.
LIBRARIES: Final = (
    "libascendcl",
    "libopapi",
    "libhccl",
    "libacl_op_compiler",
    "libge_runner",
    "libgraph",
    "libatb",
    "libacl_tdt_channel",
    "libnnopbase",
)
#: What is in them, by source; the others are empty.
_OBJECTS: Final = {
    "libascendcl": ("device", "capture", "replay", "runtime", "absent"),
    "libopapi": ("entries", "descriptors"),
    "libhccl": ("hccl",),
}
#: The names of an operator: asking for scratch, asking for the most of it, and the launch.
SUFFIXES: Final = ("GetWorkspaceSize", "GetMaxWorkspaceSize", "")
_RUNTIME_NAME = re.compile(r"(acl(?!nn)|Hccl|Msprof|rt[A-Z])\w*")
#: Each begins with plain letters, which are found in 100 MB at once.
_OPERATOR = re.compile(rb"\0(aclnn\w+)GetWorkspaceSize(?=\0)")
_LOOKED_UP = re.compile(rb"\0(acl(?:rt|prof|mdl|op|sys|Get|Set|Query)\w+)(?=\0)")


def shelf() -> Path:
    """Where the wheel is kept for the emulator alone.

    torch imports a torch_npu that it finds unasked, and so does transformers,
    which fails without CANN; what lies here, off the path, they do not find.
    """
    return Path(sys.prefix) / "share" / "mla_fx" / "emulated"


def install() -> None:
    """Put the wheel on the shelf by pip, with the one of its dependencies that torch has not; raises `InputError`."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
    command += ["--target", str(shelf()), f"torch_npu=={WHEEL}", "pyyaml"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"install: {' '.join(command)} must succeed: got status {done.returncode}\n{done.stderr}")


def wheel() -> Path:
    """The folder of torch_npu, on the path or on the shelf; raises `InputError`.  Does not import it."""
    for path in (None, [str(shelf())]):
        spec = importlib.machinery.PathFinder.find_spec("torch_npu", path)
        if spec is not None and spec.submodule_search_locations:
            return Path(spec.submodule_search_locations[0])
    raise InputError(
        "torch_npu: must be there to be emulated under: got none; python -m mla_fx.backends.ascend.emulator --install "
        f"gets torch_npu {WHEEL} and keeps it where only the emulator looks for it"
    )


def version() -> str:
    """Of the wheel."""
    (found,) = importlib.metadata.distributions(name="torch_npu", path=[str(wheel().parent)])
    return found.version


def library_folder(operators: Sequence[str]) -> Path:
    """The folder of the libraries, in which `operators` and all that the wheel knows have entry points.

    Built unless it is there, which is said on stderr.  Raises `InputError` when there is no wheel, no compiler, no
    cache that can be written, or the compiler fails.
    """
    parts = [*(_HERE / name for name in _SOURCES), Path(__file__), _HERE / "trampolines.py"]
    return compiled.built(
        "emulated-cann",
        lambda made: _compile(made, operators),
        parts,
        [version(), *operators],
        what=WHAT,
        takes="up to a minute",
    )


def entry_points(folder: Path) -> list[str]:
    """What a build has entry points for, in the order of their slots."""
    return (folder / "entries.txt").read_text().split()


def _compile(folder: Path, operators: Sequence[str]) -> None:
    """Compile all libraries into `folder`."""
    root = wheel()
    defined = "".join((_HERE / name).read_text() for name in _SOURCES)
    contents = {library: library.read_bytes() for library in (*root.glob("lib/*.so"), *root.glob("_C*.so"))}
    missing = sorted(name for name in _asked_for(contents) if f" {name}(" not in defined)
    weak = "".join(f"int {n}() __attribute__((weak)); int {n}() {{ return 0; }}\n" for n in missing)
    (folder / "absent.cpp").write_text(f'extern "C" {{\n{weak}}}\n')
    known = {name.decode() for content in contents.values() for name in _OPERATOR.findall(content)}
    entries = [name + suffix for name in sorted(known | set(operators)) for suffix in SUFFIXES]
    (folder / "entries.txt").write_text("\n".join(entries))
    (folder / "entries.s").write_text(assembly(entries, platform.machine()))
    (folder / "empty.cpp").write_text("")
    command: list[str | Path] = [compiled.compiler(WHAT), "-w", "-O1", "-std=c++17", "-fPIC"]
    command += [f"-I{root / 'include' / part}" for part in (".", "third_party/hccl/inc")]
    sources = [*_HERE.glob("*.cpp"), *(folder / name for name in ("absent.cpp", "empty.cpp", "entries.s"))]
    compiled.run(*([*command, "-c", source, "-o", folder / f"{source.stem}.o"] for source in sources))
    for library in LIBRARIES:  # the first is what all others link to
        objects = [folder / f"{name}.o" for name in _OBJECTS.get(library, ("empty",))]
        linked = [] if library == LIBRARIES[0] else ["-Wl,--no-as-needed", f"-L{folder}", f"-l{LIBRARIES[0][3:]}"]
        output: list[str | Path] = [*linked, "-o", folder / f"{library}.so", f"-Wl,-soname,{library}.so"]
        compiled.run([*command, "-shared", *objects, *output])
    for made in folder.glob("*.o"):
        made.unlink()


def _asked_for(contents: Mapping[Path, bytes]) -> set[str]:
    """Runtime functions that the wheel links to, or looks up by a name that stands in it."""
    names: set[str] = set()
    for library, content in contents.items():
        names |= {name.decode() for name in _LOOKED_UP.findall(content)}
        names |= set(_undefined(library))
    return {name for name in names if _RUNTIME_NAME.fullmatch(name)}


def _undefined(library: Path) -> list[str]:
    """Symbols that a shared library needs from others."""
    tool = shutil.which("nm")
    if tool is None:
        raise InputError("compiler: the emulator needs nm beside the C++ compiler: got none; install binutils")
    listing = subprocess.run([tool, "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
    return re.findall(r" U (\w+)", listing.stdout)
