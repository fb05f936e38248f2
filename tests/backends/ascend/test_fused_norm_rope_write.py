"""A layer's new keys as one operator: found where the angles have 16 bits, left alone elsewhere, the same numbers."""

import pytest
import torch
from attrs import evolve

from mla_fx.backends.ascend.fused import norm_rope_write
from mla_fx.backends.ascend.fused.norm_rope_write import NormRopeWrite
from mla_fx.effects import Aval, bind, ops, trace
from tests.backends.ascend.conftest import close, on_device, random, refused, with_gaps
from tests.backends.ascend.steps import LATENT, setup
from tests.backends.ascend.test_rules import right


def bf16(*shape: int) -> Aval:
    return Aval(shape, "bf16")


INPUTS = {
    "kv": bf16(3, 576),
    "weight": bf16(512),
    "cos": bf16(3, 64),
    "sin": bf16(3, 64),
    "latents": bf16(4, 16, 512),
    "ropes": bf16(4, 16, 64),
    "slots": Aval((3,), "int64"),
    "more": Aval((3,), "int64"),
}


def keys(how: str, **shapes: Aval):
    """A step that makes keys and writes them, with something of it another way."""

    def write(kv, weight, cos, sin, latents, ropes, slots, more):
        (latent,) = bind(ops.RmsNorm(1e-6), kv, weight, names=("latent",))
        (k_rope,) = bind(ops.Rope(1 if how == "a head" else None), kv, cos, sin, names=("k_rope",))
        if how == "a head":
            return latent, k_rope
        seen = ()
        (first,) = bind(ops.WriteRows(), latents, latent, slots, names=("latents",))
        if how == "a reader of the first cache":
            seen = bind(ops.WriteRows(), first, latent, more, names=("again",))
        if how == "a reader of the rows":
            seen = bind(ops.Add(), k_rope, k_rope, names=("twice",))
        rows, at = (latent if how == "the latent twice" else k_rope), (more if how == "other slots" else slots)
        into = first if how == "the latent twice" else ropes
        return latent, k_rope, first, *bind(ops.WriteRows(), into, rows, at, names=("ropes",)), *seen

    return trace(write, "keys", **{**INPUTS, **shapes})


def found(step) -> list[type]:
    return [type(equation.op) for equation in norm_rope_write.find(step).equations]


def test_it_is_found():
    assert found(keys("")) == [NormRopeWrite]
    lowered = norm_rope_write.find(setup("bf16", layers=3, round_angles=True).step)
    assert sum(isinstance(equation.op, NormRopeWrite) for equation in lowered.equations) == 3
    assert not any(isinstance(equation.op, ops.WriteRows) for equation in lowered.equations)


def test_others_may_read_its_results():
    """The keys are results of the whole; what reads them stands behind it."""
    assert found(keys("a reader of the rows")) == [ops.RmsNorm, ops.Rope, ops.WriteRows, ops.Add, ops.WriteRows]
    step = keys("")
    assert step.outputs[:2] == ("latent", "k_rope") == norm_rope_write.find(step).equations[0].results[:2]


ALONE = {
    "a reader of the first cache": {},
    "a reader of the rows": {},
    "other slots": {},
    "the latent twice": {},
    "a head": {},
    "wide angles": {"cos": Aval((3, 64), "fp32"), "sin": Aval((3, 64), "fp32")},
    "one wide angle": {"sin": Aval((3, 64), "fp32")},
    "a wider row": {"kv": bf16(3, 580)},
    "another latent": {"weight": bf16(256), "latents": bf16(4, 16, 256)},
    "another rope": {"cos": bf16(3, 32), "sin": bf16(3, 32), "ropes": bf16(4, 16, 32)},
    "small blocks": {"latents": bf16(4, 8, 512), "ropes": bf16(4, 8, 64)},
    "other blocks": {"ropes": bf16(2, 32, 64)},
}


@pytest.mark.parametrize("how", ALONE)
def test_it_is_left_alone(how):
    step = keys(how, **ALONE[how])
    assert norm_rope_write.find(step) == step


def test_steps_with_wide_angles_or_other_sizes_are_left_alone():
    for given in (
        setup("bf16"),
        setup("fp32", round_angles=True),
        evolve(setup("bf16", round_angles=True), dtype="fp32"),
    ):
        assert norm_rope_write.find(given.step) == given.step
    small = evolve(setup("bf16", round_angles=True), config=evolve(LATENT, qk_rope_head_dim=32))
    assert norm_rope_write.find(small.step) == small.step


SLOTS = [(0, 5, -1), (-1, -1, -1), (63, 0, 17), ()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("slots", SLOTS, ids=str)
def test_the_operator(release, emulator, rng, dtype, slots):
    """Keys and caches against the formulas of the parts; one call and nothing else where operands are contiguous."""
    tokens = len(slots)
    kv = random(rng, tokens, 576, dtype=dtype) * 2**-8  # so that epsilon counts
    weight = random(rng, 512, dtype=dtype)
    angles = [random(rng, tokens, 64, dtype=dtype) for _ in range(2)]
    caches = [random(rng, 4, 16, size, dtype=dtype) for size in (512, 64)]
    at = torch.tensor(slots, dtype=torch.int64)
    given = (kv, weight, *angles, *caches, at)
    with emulator.tracing() as traced:
        got = on_device(NormRopeWrite(1e-5), *given)
    names = [task.name for task in traced if task.kind == "operator"]
    assert names == (["aclnnKvRmsNormRopeCache"] if tokens else [])
    wanted = [right(ops.RmsNorm(1e-5), kv, weight)[0], right(ops.Rope(None), kv, *angles)[0]]
    for ours, exactly in zip(got, wanted, strict=False):
        close(ours, exactly)
    for cache, rows, before in zip(got[2:], got[:2], caches, strict=True):  # the rows that it gave, and nothing else
        assert torch.equal(cache, right(ops.WriteRows(), before, rows, at)[0].to(dtype))
    again = on_device(NormRopeWrite(1e-5), *given, layout=with_gaps)
    assert all(map(torch.equal, again, got))


def test_what_the_operator_does_not_take_is_refused(emulator):
    def why(**changed: torch.Tensor) -> str:
        sizes = {"kv": (1, 576), "weight": (512,), "cos": (1, 64), "sin": (1, 64), "l": (2, 16, 512), "r": (2, 16, 64)}
        tensors = {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in sizes.items()} | changed
        return refused(NormRopeWrite(1e-6), *tensors.values(), torch.tensor([0]))

    assert why(cos=torch.zeros(1, 64)) == (
        "norm_rope_write: cos: a norm with rotation and cache write needs bf16 or fp16, one of both: got fp32[1, 64]"
    )
    blocks = {"l": torch.zeros(2, 8, 512).bfloat16(), "r": torch.zeros(2, 8, 64).bfloat16()}
    assert why(**blocks) == (
        "norm_rope_write: block_size: a norm with rotation and cache write needs a multiple of 16: got 8 in 2 blocks"
    )
    assert why(kv=torch.zeros(1, 578).bfloat16()) == (
        "norm_rope_write: L, R and L + R: a norm with rotation and cache write needs 512, 64 and their sum: "
        "got (512, 64, 578)"
    )
