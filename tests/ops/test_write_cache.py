"""`ops.WriteCache`: new rows into the paged cache, in place."""

import math

import numpy as np
import pytest
import torch

from mla_fx.effects import Aval, InputError, ShapeError, ops
from tests.ops.conftest import exact, strided

BLOCKS, SIZE = 3, 4
CASES = [[5], [-1], [11, -1, 0], [-1, -1], [0, 1, 2, 3], []]


def caches(rules, rng):
    """Rows that nobody wrote are NaN."""
    pair = rules.random(rng, BLOCKS, SIZE, 6), rules.random(rng, BLOCKS, SIZE, 2)
    for cache in pair:
        cache[1:] = math.nan
    return pair


@pytest.mark.parametrize("slots", CASES)
@pytest.mark.parametrize("layout", [torch.clone, strided], ids=["contiguous", "strided"])
def test_rows_land_in_their_slots(rules, rng, slots, layout):
    latent_cache, rope_cache = (layout(cache) for cache in caches(rules, rng))
    latent, k_rope = rules.random(rng, len(slots), 6), rules.random(rng, len(slots), 2)
    latent[[slot == -1 for slot in slots]] = math.nan
    want = [exact(cache).copy() for cache in (latent_cache, rope_cache)]
    for t, slot in enumerate(slots):
        if slot >= 0:
            want[0][slot // SIZE, slot % SIZE] = exact(latent)[t]
            want[1][slot // SIZE, slot % SIZE] = exact(k_rope)[t]
    new = (layout(latent), layout(k_rope), torch.tensor(slots, dtype=torch.int64))
    rules(ops.WriteCache(), latent_cache, rope_cache, *new)
    np.testing.assert_array_equal(exact(latent_cache), want[0])
    np.testing.assert_array_equal(exact(rope_cache), want[1])


def test_slices_of_one_joint_cache(rules, rng):
    joint = rules.random(rng, BLOCKS, SIZE, 8)
    before = joint.clone()
    latent, k_rope = rules.random(rng, 1, 6), rules.random(rng, 1, 2)
    rules(ops.WriteCache(), joint[..., :6], joint[..., 6:], latent, k_rope, torch.tensor([7]))
    before[1, 3] = torch.cat([latent[0], k_rope[0]])
    assert torch.equal(joint, before)


AVALS = (
    Aval((BLOCKS, SIZE, 6), "bf16"),
    Aval((BLOCKS, SIZE, 2), "bf16"),
    Aval((2, 6), "bf16"),
    Aval((2, 2), "bf16"),
    Aval((2,), "int64"),
)


def changed(position, aval):
    return [*AVALS[:position], aval, *AVALS[position + 1 :]]


def test_shapes():
    op = ops.WriteCache()
    assert op.infer(*AVALS) == AVALS[:2]
    with pytest.raises(ShapeError, match=r"write_cache: axis S .* 4 in latent_cache, 5 in rope_cache"):
        op.infer(*changed(1, Aval((BLOCKS, 5, 2), "bf16")))
    with pytest.raises(ShapeError, match=r"write_cache: axis L .* 6 in latent_cache, 7 in latent"):
        op.infer(*changed(2, Aval((2, 7), "bf16")))
    with pytest.raises(ShapeError, match=r"write_cache: axis T .* 2 in latent, 3 in slots"):
        op.infer(*changed(4, Aval((3,), "int64")))
    with pytest.raises(ShapeError, match=r"write_cache: k_rope must have the dtype of latent_cache, bf16: got fp32"):
        op.infer(*changed(3, Aval((2, 2), "fp32")))
    with pytest.raises(ShapeError, match=r"write_cache: slots must be int64: got int32"):
        op.infer(*changed(4, Aval((2,), "int32")))


@pytest.mark.parametrize("slots", [[-1, -1], [0, 11], [3, -1], []])
def test_values_that_are_accepted(slots):
    op = ops.WriteCache()
    op.value_rule(dict(zip(op.operands, AVALS, strict=True)), {"slots": np.array(slots, dtype=np.int64)})


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([0, 12], r"slots: each must be -1 or in 0\.\.11 \(3 blocks of 4\): got 12"),
        ([-2, 3], r"slots: each must be -1 or in 0\.\.11 .*: got -2"),
        ([5, 5], r"slots: no two tokens may have one slot: got \[5, 5\]"),
    ],
)
def test_values_that_are_refused(slots, message):
    op = ops.WriteCache()
    with pytest.raises(InputError, match=message):
        op.value_rule(dict(zip(op.operands, AVALS, strict=True)), {"slots": np.array(slots)})
