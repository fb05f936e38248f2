"""The rotations of query and key as one: found by angles, left alone, five launches for six, the same bits."""

import pytest
import torch

from mla_fx.backends.ascend.fused import rope_pair
from mla_fx.backends.ascend.fused.rope_pair import RopePair
from mla_fx.effects import Aval, bind, ops, trace
from tests.backends.ascend.conftest import close, on_device, random, refused, with_gaps
from tests.backends.ascend.test_rules import right
from tests.setups import Setup

HEADS = 2
ANGLES = ("cos", "sin", "cos_2", "sin_2")


def two(how: str, dtype: str = "fp32"):
    """Two rotations with something that keeps them apart."""

    def rotations(q, kv, **angles):
        cos, sin, *others = angles.values()
        (first,) = bind(ops.Rope(HEADS), q, cos, sin, names=("first",))
        (second,) = bind(ops.Rope(None), kv, *(others if how == "other angles" else (cos, sin)), names=("second",))
        return first, second

    dtypes = "bf16" if how == "rounded angles" else dtype
    shapes = {"q": Aval((3, HEADS * 24), "bf16"), "kv": Aval((3, 40), "bf16")}
    return trace(rotations, "two", **shapes, **{name: Aval((3, 16), dtypes) for name in ANGLES})


def kinds(step) -> list[type]:
    return [type(equation.op) for equation in rope_pair.find(step).equations]


def test_they_are_found():
    step = rope_pair.find(two(""))
    (equation,) = step.equations
    assert equation.op == RopePair(HEADS)
    assert equation.operands == ("q", "kv", "cos", "sin") and equation.results == ("first", "second")
    assert rope_pair.find(step) == step


@pytest.mark.parametrize("how", ["other angles", "rounded angles"])
def test_they_are_left_alone(how):
    assert kinds(two(how)) == [ops.Rope, ops.Rope]


def test_once_in_every_layer():
    """By the same angles in all layers: each key goes with the query of its own."""
    step = rope_pair.find(Setup(layers=3, dtype="bf16").step)
    found = [equation.operands for equation in step.equations if isinstance(equation.op, RopePair)]
    assert found == [(f"q{layer}", f"kv{layer}", "cos", "sin") for layer in ("", "_1", "_2")]
    rounded = Setup(layers=3, dtype="bf16", round_angles=True).step
    assert rope_pair.find(rounded) == rounded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_the_operator(release, emulator, rng, dtype, tokens):
    """Near the definition, and bit for bit what one rotation after the other gives."""
    x, y = (random(rng, tokens, features, dtype=dtype) for features in (HEADS * 192, 576))
    turn = random(rng, tokens, 64, dtype=torch.float32)
    with emulator.tracing() as traced:
        got = on_device(RopePair(HEADS), x, y, turn.cos(), turn.sin())
    copy, turned = "aclnnInplaceCopy", "aclnnRotaryPositionEmbeddingV2"
    calls = [(task.name, task.kernels) for task in traced if task.kind == "operator"]
    assert calls == ([(name, 1) for name in (copy, copy, turned, copy, copy)] if tokens else [])
    for ours, operand, heads in zip(got, (x, y), (HEADS, None), strict=True):
        close(ours, right(ops.Rope(heads), operand, turn.cos(), turn.sin())[0])
        assert torch.equal(ours, on_device(ops.Rope(heads), operand, turn.cos(), turn.sin())[0])
    strided = on_device(RopePair(HEADS), x, y, turn.cos(), turn.sin(), layout=with_gaps)
    assert all(map(torch.equal, strided, got))


@pytest.mark.parametrize(
    ("heads", "features", "dtype", "message"),
    [
        (2, 64, torch.bfloat16, "cos: a pair of rotations on ascend needs fp32: got"),
        (999, 2, torch.float32, "needs fewer than 1000 heads of fewer than 896 features: got 1000 and 2"),
        (2, 896, torch.float32, "needs fewer than 1000 heads of fewer than 896 features: got 3 and 896"),
    ],
)
def test_what_is_refused(machine, rng, heads, features, dtype, message):
    x, y = (random(rng, 1, size, dtype=torch.bfloat16) for size in (heads * features, features))
    turn = random(rng, 1, features, dtype=dtype)
    assert message in refused(RopePair(heads), x, y, turn, turn)
