"""Which tests run: soak and packaging tests only where they are asked for."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the long random runs")
    parser.addoption("--cann", default="9.1", help="the release of CANN that tests/backends/ascend emulates")
    parser.addoption("--packaging", action="store_true", help="build and install the package in several ways")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unasked = [kind for kind in ("soak", "packaging") if not config.getoption(f"--{kind}")]
    chosen: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        (left_out if any(item.get_closest_marker(kind) for kind in unasked) else chosen).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = chosen
