"""What is compiled on first use: by which compiler, where it is kept, and what is said when it cannot be."""

import errno
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mla_fx.backends import compiled
from mla_fx.effects import InputError

WHAT = "the thing"


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, and a compiler that nobody calls."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "sh")
    return tmp_path / "mla_fx"


def built(make=lambda made: (made / "it").write_text("made"), sources=(), texts=()) -> Path:
    return compiled.built("thing", make, sources, texts, what=WHAT, takes="a moment")


def test_cache_follows_the_xdg_convention(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiled.cache() == tmp_path / "mla_fx"
    for unusable in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        monkeypatch.setenv("HOME", str(tmp_path))
        assert compiled.cache() == tmp_path / ".cache" / "mla_fx"


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(InputError, match=r"compiler: the thing .* a C\+\+ compiler \(g\+\+, clang.*\) on PATH"):
        compiled.compiler(WHAT)
    monkeypatch.setenv("CXX", "my-compiler")
    with pytest.raises(InputError, match=r"compiler: .* \(my-compiler\) on PATH: got none"):
        compiled.compiler(WHAT)


def test_builds_once_for_what_it_is_made_of(fresh, tmp_path, capfd):
    source = tmp_path / "source.cpp"
    source.write_text("one")
    folder = built(sources=[source], texts=["-O1"])
    assert capfd.readouterr().err.startswith(f"mla_fx: compiling the thing, once, into {folder}: a moment\n")
    assert (folder / "it").read_text() == "made" and list(fresh.iterdir()) == [folder]

    def never(made: Path) -> None:
        raise AssertionError("made again")

    assert built(never, sources=[source], texts=["-O1"]) == folder and capfd.readouterr() == ("", "")
    others = {built(sources=[source], texts=["-O2"])}
    source.write_text("two")
    others.add(built(sources=[source], texts=["-O1"]))
    assert len(others | {folder}) == 3


def test_a_build_that_fails_leaves_nothing(fresh):
    """And says what the compiler said, whichever of those side by side it was."""
    with pytest.raises(InputError, match=r"compiler: sh .* must succeed: got status 3\nno such instruction"):
        built(lambda made: compiled.run(["true"], ["sh", "-c", "echo no such instruction >&2; exit 3"]))
    assert list(fresh.iterdir()) == []


@pytest.mark.parametrize("blocked", ["", "mla_fx"])
def test_a_cache_that_cannot_be_written(fresh, monkeypatch, blocked):
    """A file where a folder should be: even root cannot write there."""
    place = fresh.parent / "place"
    (place / blocked).parent.mkdir(exist_ok=True)
    (place / blocked).write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    with pytest.raises(InputError, match=rf"XDG_CACHE_HOME: the thing is .* into {place}/mla_fx, .*: got \[Errno"):
        built()


def test_of_two_that_come_together_one_builds(fresh, capfd):
    begun, made_by = threading.Event(), []

    def slow(made: Path) -> None:
        begun.set()
        while "waits for another" not in (said := "".join(capfd.readouterr())):
            assert time.monotonic() < end, said
            time.sleep(0.005)
        made_by.append("first")

    end = time.monotonic() + 20
    with ThreadPoolExecutor() as pool:
        first = pool.submit(built, slow)
        assert begun.wait(20)
        second = pool.submit(built, lambda made: made_by.append("second"))
        assert first.result() == second.result() and made_by == ["first"]
    assert list(fresh.iterdir()) == [first.result()]


def test_without_locks_the_second_of_two_builders_takes_what_the_first_made(fresh, monkeypatch):
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    def slow(made: Path) -> None:
        (made / "it").write_text("second")
        built(lambda made: (made / "it").write_text("first"))  # as another process, which is faster

    monkeypatch.setattr(compiled.fcntl, "flock", no_locks)
    folder = built(slow)
    assert (folder / "it").read_text() == "first" and [path.name for path in fresh.iterdir()] == [folder.name]
