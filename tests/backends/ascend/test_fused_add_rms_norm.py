"""The residual and its norm as one operator: found, left alone, the same numbers."""

import pytest
import torch

from mla_fx.backends.ascend.fused import add_rms_norm
from mla_fx.backends.ascend.fused.add_rms_norm import AddRmsNorm
from mla_fx.effects import Aval, Group, bind, ops, trace
from tests.backends.ascend.conftest import close, on_device, random, with_gaps
from tests.backends.ascend.test_rules import right
from tests.setups import Setup

X = Aval((3, 16), "fp32")


def residual(how: str, features: int = 16):
    def block(x, y, weight):
        (h,) = bind(ops.Add(), x, y, names=("h",))
        total = bind(ops.AllReduce(Group("tp", 2)), h, names=("total",)) if how == "needed between" else ()
        (normed,) = bind(ops.RmsNorm(1e-6), y if how == "a norm of something else" else h, weight, names=("normed",))
        return (h, normed, *total)

    return trace(block, "residual", x=X, y=X, weight=Aval((features,), "fp32"))


def kinds(step) -> list[type]:
    return [type(equation.op) for equation in add_rms_norm.find(step).equations]


def test_it_is_found():
    """The sum is needed by others too: the whole gives both."""
    step = add_rms_norm.find(residual(""))
    assert [type(e.op) for e in step.equations] == [AddRmsNorm] and step.outputs == ("h", "normed")
    given = Setup(layers=3)
    steps = (given.step, add_rms_norm.find(given.step))
    sums = [sum(isinstance(e.op, ops.Add) for e in one.equations) for one in steps]
    # of every layer the one before its feed-forward, and the one behind it, whose norm is the next layer's or the last
    assert kinds(given.step).count(AddRmsNorm) == 6 and sums[0] - sums[1] == 6


@pytest.mark.parametrize(
    ("how", "features"), [("needed between", 16), ("a norm of something else", 16), ("of some features", 8)]
)
def test_it_is_left_alone(how, features):
    step = residual(how, features)
    assert add_rms_norm.find(step) == step


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_the_operator(release, emulator, rng, dtype, tokens):
    """The sum rounded once, and the norm of it as it was rounded."""
    x, y, weight = (random(rng, *shape, dtype=dtype) for shape in ((tokens, 16), (tokens, 16), (16,)))
    x, y = x * 2**-8, y * 2**-8  # so that epsilon counts
    with emulator.tracing() as traced:
        h, normed = on_device(AddRmsNorm(1e-5), x, y, weight)
    assert [task.name for task in traced if task.kind == "operator"] == (["aclnnAddRmsNorm"] if tokens else [])
    assert torch.equal(h, (x.double() + y.double()).to(dtype))
    close(normed, right(ops.RmsNorm(1e-5), h, weight)[0])
    assert all(map(torch.equal, on_device(AddRmsNorm(1e-5), x, y, weight, layout=with_gaps), (h, normed)))
