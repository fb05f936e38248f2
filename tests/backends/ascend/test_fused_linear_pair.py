"""Two products of the same activations as one launch: found, brought together, left alone, the same numbers.

Those in 8 bits are found by the same search.
"""

import pytest
import torch

from mla_fx.backends.ascend.fused import linear_pair, quant_linear_pair
from mla_fx.backends.ascend.fused.linear_pair import LinearPair
from mla_fx.backends.ascend.fused.quant_linear_pair import QuantLinearPair
from mla_fx.effects import Aval, Op, bind, ops, parameters, trace
from tests.backends.ascend.conftest import close, on_device, random, refused, with_gaps
from tests.backends.ascend.test_rules import right
from tests.setups import Setup

X, WEIGHT = Aval((3, 16), "fp32"), Aval((24, 16), "fp32")


class Shift(Op):
    """`x` [T, D], next version of it; somebody's own op that writes activations."""

    operands = {"x": "T D"}  # noqa: RUF012
    results = ("x",)
    writes = {"x": "x"}  # noqa: RUF012

    def shape_rule(self, axes, dtype):
        return (Aval((axes["T"], axes["D"]), dtype),)


def two(how: str):
    """Two products with something between them."""

    def products(x, y, first, second, third, made):
        (a,) = bind(ops.Linear(), x, first, names=("a",))
        shifted = bind(Shift(), x, names=("shifted",)) if how == "the input is written between" else ()
        (b,) = bind(ops.Linear(), a if how == "a product of the first" else y, third, names=("b",))
        if how == "a weight that is made":
            (second,) = bind(ops.Add(), made, made, names=("sum",))
        (c,) = bind(ops.Linear(), x, second, names=("c",))
        return a, b, c, *shifted

    third = Aval((8, 24 if how == "a product of the first" else 16), "fp32")
    shapes = {"first": WEIGHT, "second": WEIGHT, "third": third}
    weights = {name: parameters(aval) for name, aval in shapes.items()}
    return trace(products, "two", x=X, y=X, **weights, made=WEIGHT)


def kinds(step) -> list[type]:
    return [type(equation.op) for equation in linear_pair.find(step).equations]


@pytest.mark.parametrize("how", ["", "a product of the first"])
def test_the_second_is_brought_to_the_first(how):
    step = linear_pair.find(two(how))
    assert kinds(two(how)) == [LinearPair, ops.Linear]
    assert step.equations[0].results == ("a", "c") and step.equations[0].operands == ("x", "first", "second")
    assert linear_pair.find(step) == step


@pytest.mark.parametrize("how", ["the input is written between", "a weight that is made"])
def test_it_is_left_alone(how):
    step = two(how)
    assert linear_pair.find(step) == step and LinearPair not in kinds(step)


def test_of_three_products_two_are_one():
    def products(x, first, second, third):
        return tuple(bind(ops.Linear(), x, weight)[0] for weight in (first, second, third))

    step = trace(products, "three", x=X, **{name: parameters(WEIGHT) for name in ("first", "second", "third")})
    assert kinds(step) == [LinearPair, ops.Linear]


def test_it_is_found_once_in_every_layer():
    given = Setup(layers=3)
    assert kinds(given.step).count(LinearPair) == 3
    steps = (given.step, linear_pair.find(given.step))
    before, after = (sum(isinstance(e.op, ops.Linear) for e in step.equations) for step in steps)
    assert before - after == 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_the_operator(release, emulator, rng, dtype, tokens):
    x, first, second = (random(rng, *shape, dtype=dtype) for shape in ((tokens, 16), (24, 16), (8, 16)))
    with emulator.tracing() as traced:
        got = on_device(LinearPair(), x, first, second)
    tasks = [task for task in traced if task.kind == "operator"]
    assert [(task.name, task.kernels) for task in tasks] == ([("aclnnGroupedMatmulV5", 1)] if tokens else [])
    for ours, weight in zip(got, (first, second), strict=True):
        close(ours, right(ops.Linear(), x, weight)[0])
    assert all(map(torch.equal, on_device(LinearPair(), x, first, second, layout=with_gaps), got))


# --- in 8 bits --------------------------------------------------------------------------


def eight(rng, tokens, dtype):
    weights = [(torch.as_tensor(rng.integers(-128, 128, (features, 16))).to(torch.int8)) for features in (32, 8)]
    scales = [torch.as_tensor(rng.random(features)).float() / 127 for features in (32, 8)]
    return random(rng, tokens, 16, dtype=dtype), *(part for pair in zip(weights, scales, strict=True) for part in pair)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [0, 3])
def test_two_in_8_bits_are_three_operators(release, emulator, rng, dtype, tokens):
    """`x` is quantised once; the bits are those of one after the other, the second weight too small for the format."""
    x, *weights = operands = eight(rng, tokens, dtype)
    with emulator.tracing() as traced:
        got = on_device(QuantLinearPair(), *operands)
    names = [task.name for task in traced if task.kind == "operator" and "Quant" in task.name]
    one = "aclnnQuantMatmulV5"
    first = "aclnnQuantMatmulWeightNz" if release == "9.1" else one
    assert names == (["aclnnDynamicQuantV2", first, one] if tokens else [])
    apart = [on_device(ops.QuantLinear(), x, *weights[at : at + 2])[0] for at in (0, 2)]
    assert all(map(torch.equal, got, apart))
    assert all(map(torch.equal, on_device(QuantLinearPair(), *operands, layout=with_gaps), got))


def test_it_is_found_in_8_bits():
    given = Setup(layers=2, quantization="w8a8", dtype="bf16")
    step = quant_linear_pair.find(given.step)
    assert [equation.op for equation in step.equations].count(QuantLinearPair()) == 2
    assert len(given.step.equations) - len(step.equations) == 2
    assert quant_linear_pair.find(Setup(quantization="w8a8").step) == Setup(quantization="w8a8").step  # in float32


def test_it_is_refused_in_float32(rng, machine):
    assert "must be bf16 or fp16: got fp32" in refused(QuantLinearPair(), *eight(rng, 3, torch.float32))
