"""The emulated CANN libraries, compiled on first use into a cache.

Decided here: what is built, from what, and where it is kept.  The wheel links
to nine libraries by name.  `libascendcl.so` is the runtime, `libopapi.so` the
operators' entry points, `libhccl.so` the collectives; the others are empty and
only satisfy the loader.  What the wheel asks for and none of the sources
here defines is a weak function that returns 0, so that a call which
matters and is missing shows at that call.

Every operator that the wheel can ask for has an entry point, emulated or not:
where one were missing, the wheel would take an older way, and fail far from the call.

A build lies in `$XDG_CACHE_HOME/mla_fx` (`~/.cache/mla_fx`), in a folder named
by the hash of everything it was made from; it appears there complete or not at
all, so that processes may race for it.
"""

import hashlib
import importlib.machinery
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from mla_fx.backends.ascend.emulator.trampolines import assembly
from mla_fx.effects import InputError

_HERE = Path(__file__).parent
_SOURCES = (
    *("device.h", "device.cpp", "capture.h", "graph.h", "capture.cpp", "replay.cpp"),
    *("runtime.cpp", "descriptors.cpp", "hccl.cpp"),
)
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
#: The names of an operator: asking for scratch, asking for the most of it, and the launch.
SUFFIXES: Final = ("GetWorkspaceSize", "GetMaxWorkspaceSize", "")
_RUNTIME_NAME = re.compile(r"(acl(?!nn)|Hccl|Msprof|rt[A-Z])\w*")
_OPERATOR = re.compile(rb"(?<=\0)(aclnn\w+)GetWorkspaceSize(?=\0)")
_LOOKED_UP = re.compile(rb"(?<=\0)(?:aclrt|aclprof|aclmdl|aclop|aclsys|aclGet|aclSet|aclQuery)\w+(?=\0)")


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


def compiler() -> str:
    """A C++ compiler: $CXX, else the first of g++, clang++ and c++; raises `InputError`."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        raise InputError(
            f"compiler: the emulator is compiled on first use and needs a C++ compiler ({', '.join(names)}) on PATH: "
            "got none; install one (Debian, Ubuntu: g++) or name it in CXX"
        )
    return found


def cache() -> Path:
    """Where builds are kept."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "mla_fx"


def library_folder(operators: Sequence[str]) -> Path:
    """The folder of the libraries, in which `operators` and all that the wheel knows have entry points.

    Built unless it is there, which is said on stderr.  Raises `InputError` when there is no wheel, no compiler, no
    cache that can be written, or the compiler fails.
    """
    made_from = hashlib.sha256()
    for part in (*(_HERE / name for name in _SOURCES), Path(__file__), _HERE / "trampolines.py"):
        made_from.update(part.read_bytes())
    for text in (version(), platform.machine(), sys.platform, compiler(), *operators):
        made_from.update(f"{text}\0".encode())
    folder = cache() / f"emulated-cann-{made_from.hexdigest()[:20]}"
    if not folder.is_dir():
        with _workplace() as made:
            print(f"mla_fx: compiling the emulated CANN, once, into {folder}: up to a minute", file=sys.stderr)
            start = time.monotonic()
            _compile(made, operators)
            try:
                made.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process was first, with the same content
                    raise
            print(f"mla_fx: compiled in {time.monotonic() - start:.0f} s", file=sys.stderr)
    return folder


@contextmanager
def _workplace() -> Iterator[Path]:
    """An empty folder in the cache, which goes away unless it is moved; raises `InputError` where none can be made."""
    try:
        cache().mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(dir=cache(), prefix="building-")
    except OSError as error:
        raise InputError(
            f"XDG_CACHE_HOME: the emulator is compiled into {cache()}, where a folder must be possible to make; "
            f"name another place in XDG_CACHE_HOME: got {error}"
        ) from None
    with temporary as name:
        made = Path(name) / "lib"
        made.mkdir()
        yield made


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
    headers = [f"-I{root / 'include' / part}" for part in (".", "third_party/hccl/inc")]
    sources: dict[str, list[str | Path]] = {
        "libascendcl": [
            *headers,
            *(_HERE / name for name in ("device.cpp", "capture.cpp", "replay.cpp", "runtime.cpp")),
            folder / "absent.cpp",
        ],
        "libopapi": [folder / "entries.s", _HERE / "descriptors.cpp"],
        "libhccl": [*headers, _HERE / "hccl.cpp"],
    }
    for library in LIBRARIES:
        linked = [] if library == "libascendcl" else ["-Wl,--no-as-needed", f"-L{folder}", "-lascendcl"]
        _run(
            [compiler(), "-w", "-O1", "-std=c++17", "-shared", "-fPIC"],
            [*sources.get(library, [folder / "empty.cpp"]), *linked],
            ["-o", folder / f"{library}.so", f"-Wl,-soname,{library}.so"],
        )


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


def _run(*parts: Sequence[str | Path]) -> None:
    command = [str(word) for part in parts for word in part]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"compiler: {' '.join(command)} must succeed: got status {done.returncode}\n{done.stderr}")
