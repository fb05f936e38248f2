"""The CUDA backend on a GPU where there is one, and on a stand-in for `torch.cuda` everywhere."""

from collections.abc import Callable

import pytest

from mla_fx import backends
from mla_fx.backends import Backend, cuda
from mla_fx.effects import InputError
from tests.backends.standin import Machine


def why_not() -> str | None:
    """Why nothing can run on a GPU here, None where it can."""
    try:
        cuda.require_gpu()
    except InputError as error:
        return str(error)
    return None


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A device whose tensors stay on the host; all else is as on a GPU."""
    return Machine(monkeypatch)


@pytest.fixture(params=["stand-in", "gpu"])
def on_cuda(request: pytest.FixtureRequest) -> Callable[[int], Backend]:
    """A maker of backends of so many ranks."""
    if request.param == "stand-in":
        made: Machine = request.getfixturevalue("machine")
        return lambda ranks: made.backend(ranks, cuda.TABLE, "cuda")
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    return lambda ranks: backends.get("cuda", ranks=ranks)
