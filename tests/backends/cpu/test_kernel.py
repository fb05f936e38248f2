"""The library of compiled kernels: its engine, what chooses it, and what is done without it."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mla_fx.backends import compiled
from mla_fx.backends.cpu import kernel
from mla_fx.effects import InputError

HERE = Path(kernel.__file__).resolve().parent


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The library is looked for again, and again behind the test."""
    kernel.library()  # before anything is patched, so that what is built is built in the cache that there is
    kernel.library.cache_clear()
    kernel.engine.cache_clear()
    with monkeypatch.context() as patch:
        yield patch
    kernel.library.cache_clear()
    kernel.engine.cache_clear()


def why_not() -> str | None:
    try:
        compiled.compiler(kernel.WHAT)
    except InputError as error:
        return str(error)
    return None if kernel.platform.machine() == "x86_64" else "not x86-64"


here = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@here
def test_it_is_built_and_has_an_engine_of_this_processor(anew):
    anew.delenv(kernel.CHOICE, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernel.library() is not None
        flags = set(Path("/proc/cpuinfo").read_text().split())
        assert (kernel.engine() is None) == (not {"avx2", "fma", "f16c"} <= flags)


@here
def test_one_openmp_serves_torch_and_the_library():
    kernel.library()
    assert torch.get_num_threads() >= 1
    lines = Path("/proc/self/maps").read_text().splitlines()
    assert len({line.split()[-1] for line in lines if "libgomp" in line}) == 1


@pytest.mark.parametrize("how", ["no compiler", "a compiler that fails", "no cache"])
def test_without_a_library_it_is_said_once(anew, tmp_path, how):
    anew.delenv(kernel.CHOICE, raising=False)
    anew.delenv("CXX", raising=False)
    if how == "no compiler":
        anew.setenv("PATH", str(tmp_path))
    else:
        anew.setenv("CXX", "false")
        anew.setenv("XDG_CACHE_HOME", str(tmp_path))
    if how == "no cache":
        (tmp_path / "mla_fx").write_text("")
    with pytest.warns(UserWarning, match="computes on the CPU by plain torch") as said:
        assert [kernel.engine(), kernel.library(), kernel.engine()] == [None] * 3
    (line,) = (str(warning.message) for warning in said)
    assert "\n" not in line
    reason = {"no compiler": "g++", "a compiler that fails": "must succeed", "no cache": "XDG_CACHE_HOME"}[how]
    assert reason in line


def test_torch_can_be_chosen(anew):
    anew.setenv(kernel.CHOICE, "torch")
    anew.setattr(kernel, "library", lambda: pytest.fail("nothing is built for it"))
    assert kernel.engine() is None


def test_a_choice_that_there_is_not_is_refused(anew):
    anew.setenv(kernel.CHOICE, "fast")
    with pytest.raises(InputError, match=r"MLA_FX_CPU_ENGINE: must be one of .*fma, torch: got 'fast'"):
        kernel.engine()
    anew.setattr(kernel, "library", lambda: None)
    anew.setenv(kernel.CHOICE, "fma")
    with pytest.raises(InputError, match=r"MLA_FX_CPU_ENGINE: must be one of what there is here, torch: got 'fma'"):
        kernel.engine()


def test_sources_are_shipped():
    """All C++ is read for the name of the build, and lies in the package, beside the modules."""
    assert set(kernel._sources()) == {*HERE.glob("*.cpp"), *HERE.glob("*.h")}
    assert set(kernel._UNITS) == {path.name for path in HERE.glob("*.cpp")}
