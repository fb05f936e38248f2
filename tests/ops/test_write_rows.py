"""`ops.WriteRows`: new rows into a paged cache, in place."""

import math

import numpy as np
import pytest
import torch

from mla_fx.backends.cpu import TABLE as CPU
from mla_fx.effects import Aval, InputError, ShapeError, ops
from tests.cases import each
from tests.ops.conftest import exact, strided

BLOCKS, SIZE = 3, 4
CASES = [[5], [-1], [11, -1, 0], [-1, -1], [0, 1, 2, 3], []]


def empty(rules, rng, features):
    """A cache in which nobody wrote to any block but the first: NaN."""
    cache = rules.random(rng, BLOCKS, SIZE, features)
    cache[1:] = math.nan
    return cache


@each("slots", CASES)
@each("features", [1, 2, 6])
@each("layout", [torch.clone, strided])
def test_rows_land_in_their_slots(rules, rng, slots, features, layout):
    cache, rows = layout(empty(rules, rng, features)), rules.random(rng, len(slots), features)
    rows[[slot == -1 for slot in slots]] = math.nan
    want = exact(cache).copy()
    for t, slot in enumerate(slots):
        if slot >= 0:
            want[slot // SIZE, slot % SIZE] = exact(rows)[t]
    rules(ops.WriteRows(), cache, layout(rows), layout(torch.tensor(slots, dtype=torch.int64)))
    np.testing.assert_array_equal(exact(cache), want)


def test_slices_of_one_joint_cache(rules, rng):
    """Neither writes a feature of the other."""
    joint = rules.random(rng, BLOCKS, SIZE, 8)
    before = joint.clone()
    latent, k_rope = rules.random(rng, 1, 6), rules.random(rng, 1, 2)
    rules(ops.WriteRows(), joint[..., :6], latent, torch.tensor([7]))
    before[1, 3, :6] = latent[0]
    assert torch.equal(joint, before)
    rules(ops.WriteRows(), joint[..., 6:], k_rope, torch.tensor([7]))
    before[1, 3, 6:] = k_rope[0]
    assert torch.equal(joint, before)


def test_operands_but_the_cache_stay_as_they_were(rules, rng):
    rows, slots = rules.random(rng, 3, 2), torch.tensor([9, -1, 2])
    before = rows.clone(), slots.clone()
    rules(ops.WriteRows(), empty(rules, rng, 2), rows, slots)
    assert torch.equal(rows, before[0]) and torch.equal(slots, before[1])


AVALS = {"cache": Aval((BLOCKS, SIZE, 6), "bf16"), "rows": Aval((2, 6), "bf16"), "slots": Aval((2,), "int64")}


def test_shapes():
    assert ops.WriteRows().infer(*AVALS.values()) == (AVALS["cache"],)


@pytest.mark.parametrize(
    ("operand", "aval", "message"),
    [
        ("cache", Aval((BLOCKS * SIZE, 6), "bf16"), r"cache must be \[C, S, F\], 3 axes: got bf16\[12, 6\], 2 axes"),
        ("cache", Aval((BLOCKS, SIZE, 6), "int8"), r"cache must be floating \(bf16, .*\): got int8"),
        ("rows", Aval((2, 7), "bf16"), r"axis F .* 6 in cache, 7 in rows"),
        ("rows", Aval((2, 6), "fp32"), r"rows must have the dtype of cache, bf16: got fp32"),
        ("slots", Aval((3,), "int64"), r"axis T .* 2 in rows, 3 in slots"),
        ("slots", Aval((2,), "int32"), r"slots must be int64: got int32"),
    ],
)
def test_shapes_that_are_refused(operand, aval, message):
    with pytest.raises(ShapeError, match="^write_rows: " + message):
        ops.WriteRows().infer(*(AVALS | {operand: aval}).values())


@pytest.mark.parametrize("slots", [[-1, -1], [0, 11], [3, -1], []])
def test_values_that_are_accepted(slots):
    ops.WriteRows().value_rule(AVALS, {"slots": np.array(slots, dtype=np.int64)})


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([0, 12], r"slots: each must be -1 or in 0\.\.11 \(3 blocks of 4\): got 12"),
        ([-2, 3], r"slots: each must be -1 or in 0\.\.11 .*: got -2"),
        ([5, 5], r"slots: no two tokens may have one slot: got \[5, 5\]"),
    ],
)
def test_values_that_are_refused(slots, message):
    with pytest.raises(InputError, match=message):
        ops.WriteRows().value_rule(AVALS, {"slots": np.array(slots)})


def test_a_slot_behind_the_cache_is_refused_with_nothing_written():
    """On the CPU, whose library would write elsewhere otherwise: no run but the first looks at values."""
    cache, rows = torch.zeros(BLOCKS, SIZE, 2), torch.ones(2, 2)
    with pytest.raises(InputError, match=r"slots\[1\]: must be in -1\.\.11: got 12"):
        CPU.rules[ops.WriteRows](cache, rows, torch.tensor([3, 12]), run=None)
    assert not cache.any()
