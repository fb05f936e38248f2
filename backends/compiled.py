"""What is compiled on first use: by which compiler, and where it is kept.

A build lies in `$XDG_CACHE_HOME/mla_fx` (`~/.cache/mla_fx`), in a folder named
by the hash of everything it was made from; it appears there complete or not at
all, so that processes may race for it.  They take turns where the file system
has locks: who comes second finds what the first has made.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mla_fx.effects import InputError


def compiler(what: str) -> str:
    """A C++ compiler: $CXX, else the first of g++, clang++ and c++; raises `InputError`, naming `what` wants it."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        raise InputError(
            f"compiler: {what} is compiled on first use and needs a C++ compiler ({', '.join(names)}) on PATH: "
            "got none; install one (Debian, Ubuntu: g++) or name it in CXX"
        )
    return found


def cache() -> Path:
    """Where builds are kept."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "mla_fx"


def built(
    name: str, make: Callable[[Path], None], sources: Sequence[Path], texts: Sequence[str], *, what: str, takes: str
) -> Path:
    """The folder that `make` has filled, from these sources and texts, this compiler and this machine.

    Made unless it is there, which is said on stderr: `what` is compiled, and `takes` how long.  Raises `InputError`
    when there is no compiler, no cache that can be written, or the compiler fails.
    """
    made_from = hashlib.sha256()
    for source in sources:
        made_from.update(source.read_bytes())
    for text in (platform.machine(), sys.platform, compiler(what), *texts):
        made_from.update(f"{text}\0".encode())
    folder = cache() / f"{name}-{made_from.hexdigest()[:20]}"
    if not folder.is_dir():
        with _workplace(what) as made, _turn(what):
            if folder.is_dir():  # by now
                return folder
            print(f"mla_fx: compiling {what}, once, into {folder}: {takes}", file=sys.stderr)
            start = time.monotonic()
            make(made)
            try:
                made.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process was first, with the same content
                    raise
            print(f"mla_fx: compiled in {time.monotonic() - start:.0f} s", file=sys.stderr)
    return folder


@contextmanager
def _workplace(what: str) -> Iterator[Path]:
    """An empty folder in the cache, which goes away unless it is moved; raises `InputError` where none can be made."""
    try:
        cache().mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(dir=cache(), prefix="building-")
    except OSError as error:
        raise InputError(
            f"XDG_CACHE_HOME: {what} is compiled into {cache()}, where a folder must be possible to make; "
            f"name another place in XDG_CACHE_HOME: got {error}"
        ) from None
    with temporary as name:
        made = Path(name) / "lib"
        made.mkdir()
        yield made


@contextmanager
def _turn(what: str) -> Iterator[None]:
    """Nobody else builds meanwhile; that another one does, and is waited for, is said on stderr."""
    place = os.open(cache(), os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks: both build, and one's is taken
            try:
                fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"mla_fx: {what} waits for another process, which is compiling", file=sys.stderr)
                fcntl.flock(place, fcntl.LOCK_EX)
        yield
    finally:
        os.close(place)


def run(*commands: Sequence[str | Path]) -> None:
    """Run commands of a compiler, side by side; raises `InputError` with what the first one that fails has said."""
    running = [
        (words, subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        for words in ([str(word) for word in command] for command in commands)
    ]
    done = [(words, process.communicate()[0], process.returncode) for words, process in running]
    for words, said, status in done:
        if status:
            raise InputError(f"compiler: {' '.join(words)} must succeed: got status {status}\n{said}")
