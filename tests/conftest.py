"""Which tests run, soak, bench and packaging tests only where they are asked for; and where processes come from."""

import gc
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.processes import Nursery


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """The garbage collector does not look at what tests are made of, which is most of all objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the long random runs")
    parser.addoption("--bench", action="store_true", help="run the timings")
    parser.addoption("--cann", default="9.1", help="the release of CANN that tests/backends/ascend emulates")
    parser.addoption("--packaging", action="store_true", help="build and install the package in several ways")


def pytest_sessionstart(session: pytest.Session) -> None:
    """The kernels are compiled, where they are not yet, before a test reads what a process says."""
    deals_out = bool(session.config.getoption("numprocesses", None)) and not hasattr(session.config, "workerinput")
    if not deals_out:
        from mla_fx.backends.cpu import kernel  # with torch, which the process that deals out the tests need not load

        kernel.library()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unasked = [kind for kind in ("soak", "bench", "packaging") if not config.getoption(f"--{kind}")]
    chosen: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        (left_out if any(item.get_closest_marker(kind) for kind in unasked) else chosen).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = chosen


@pytest.fixture(scope="session")
def processes() -> "Iterator[Nursery]":
    """Where processes are forked from, one for all tests."""
    from tests.processes import nursery  # with torch, which the process that deals out the tests need not load

    with nursery() as made:
        yield made
