"""Two cache writes as one operator: found in a step, the same bits on every backend, left alone where it must be."""

import itertools

import pytest
import torch
from torch.utils import _pytree as pytree

from mla_fx import backends, orchestrations
from mla_fx.backends.ascend.fused import write_rows_pair
from mla_fx.backends.ascend.fused.write_rows_pair import WriteRowsPair
from mla_fx.effects import Aval, InputError, bind, check, on_host, ops, schedule, trace
from tests.backends.ascend.conftest import close, on_device, random, refused
from tests.backends.ascend.steps import Trial, equal, leaves, setup
from tests.backends.ascend.test_rules import SLOTS, each_dtype, right
from tests.cases import mostly_soak
from tests.setups import Setup

CACHE, ROPE = Aval((3, 4, 16), "fp32"), Aval((3, 4, 8), "fp32")
ROWS, TURNED, SLOT = Aval((2, 16), "fp32"), Aval((2, 8), "fp32"), Aval((2,), "int64")


def count(step, op):
    return sum(isinstance(equation.op, op) for equation in step.equations)


def lowered(given: Setup):
    return write_rows_pair.find(given.step)


# --- the pass ----------------------------------------------------------------------


@pytest.mark.parametrize("layers", [None, 3])
def test_it_is_found_once_in_every_layer(layers):
    given = Setup(layers=layers)
    step, writes = lowered(given), layers or 1
    assert count(given.step, ops.WriteRows) == 2 * writes and count(given.step, WriteRowsPair) == 0
    assert count(step, ops.WriteRows) == 0 and count(step, WriteRowsPair) == writes
    assert (step.inputs, step.outputs) == (given.step.inputs, given.step.outputs)
    others = [e for e in step.equations if not isinstance(e.op, WriteRowsPair)]
    assert others == [e for e in given.step.equations if not isinstance(e.op, ops.WriteRows)]
    assert write_rows_pair.find(step) == step


def test_it_is_a_step_like_any_other():
    """Printed, scheduled and checked."""
    given = Setup()
    step = lowered(given)
    line = (
        "cache.latent_1: fp32[12, 4, 16], cache.rope_1: fp32[12, 4, 4] = write_rows_pair "
        "cache.latent cache.rope latent k_rope batch.slots"
    )
    assert line in " ".join(str(step).split())
    program = schedule(step, orchestrations.attention_aside)
    check(program)
    (launch,) = [launch for launch in program.launches if isinstance(launch.op, WriteRowsPair)]
    assert launch.stream == "main" and launch.tag.endswith("keys")
    assert program.states() == ("cache.latent", "cache.rope")


# --- where it must be left alone -----------------------------------------------------


def written(second: str, **shapes: Aval):
    """A step that writes the latent cache, then something else."""
    given = {"cache": CACHE, "rope": ROPE, "rows": ROWS, "turned": TURNED, "slots": SLOT, "more": SLOT, **shapes}
    lengths, table = Aval((1,), "int64"), Aval((1, 2), "int32")
    q = {"q": Aval((2, 1, 16), "fp32"), "r": Aval((2, 1, 8), "fp32")}

    def write(cache, rope, rows, turned, slots, more, q, r, table, query, history):
        (new,) = bind(ops.WriteRows(), cache, rows, slots)
        seen = ()
        match second:
            case "other slots":
                slots = more
            case "the same cache":
                return bind(ops.WriteRows(), new, rows, slots)
            case "a reader of the first":
                seen = bind(ops.HistoryAttention(0.1), q, r, new, rope, table, query, history)
            case "a reader of what the second replaces":
                seen = bind(ops.HistoryAttention(0.1), q, r, cache, rope, table, query, history)
        return (new, *bind(ops.WriteRows(), rope, turned, slots), *seen)

    return trace(write, "written", **given, **q, table=table, query=on_host(lengths), history=on_host(lengths))


def test_two_writes_are_one_where_nothing_is_between():
    assert count(write_rows_pair.find(written("")), WriteRowsPair) == 1


BF16 = {"rope": Aval((3, 4, 8), "bf16"), "turned": Aval((2, 8), "bf16")}
ALONE = {
    "other slots": {},
    "the same cache": {},
    "a reader of the first": {},
    "a reader of what the second replaces": {},
    "another dtype": BF16,
    "other blocks": {"rope": Aval((6, 2, 8), "fp32")},
}


@pytest.mark.parametrize("second", ALONE)
def test_it_is_left_alone(second):
    step = written(second, **ALONE[second])
    assert count(step, ops.WriteRows) == 2 and write_rows_pair.find(step) == step


def test_of_three_writes_two_are_one():
    def write(cache, rope, third, rows, turned, slots):
        return tuple(
            bind(ops.WriteRows(), into, new, slots)[0] for into, new in ((cache, rows), (rope, turned), (third, rows))
        )

    step = trace(write, "written", cache=CACHE, rope=ROPE, third=CACHE, rows=ROWS, turned=TURNED, slots=SLOT)
    assert [type(e.op) for e in write_rows_pair.find(step).equations] == [WriteRowsPair, ops.WriteRows]


# --- what it computes ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "layers"),
    mostly_soak(itertools.product(["reference", "cpu"], [None, 2]), [("reference", None), ("cpu", 2)]),
)
def test_other_backends_run_it_by_its_definition(name, layers):
    """On the hostile machine too, under every seed."""
    given = Setup(layers=layers)

    def found(step, seed=None):
        backend = backends.get(name, ranks=2, adversary=seed)
        assert WriteRowsPair not in backend.table.rules
        run = given.compiled(backend, schedule(step, orchestrations.attention_aside))
        return pytree.tree_leaves(run(*backend.put(given.arguments(), copy=True)))

    expected = found(given.step)
    for seed in (None, *range(3)):
        assert equal(found(lowered(given), seed), expected), f"seed {seed}"


@pytest.mark.parametrize(
    ("dtype", "layers"), mostly_soak(itertools.product(["bf16", "fp32"], [None, 2]), [("bf16", 2), ("fp32", None)])
)
def test_fused_and_apart_give_the_same_bits(emulator, dtype, layers):
    """A layer's step on the emulated device: one operator less for each rank and layer, under every seed."""
    given, backend = setup(dtype, layers=layers), backends.get("ascend", ranks=2)
    apart = schedule(given.step, orchestrations.attention_aside)
    step = lowered(given)
    assert count(step, WriteRowsPair) == (layers or 1)
    expected = leaves(backend, apart, given)
    trial = Trial(backend, schedule(step, orchestrations.attention_aside), given)
    for seed in range(3):
        emulator.seed(seed)
        assert equal(trial(), expected), f"seed {seed}"
    calls = []
    for one in (Trial(backend, apart, given), trial):
        one()
        with emulator.tracing() as traced:
            one()
        calls.append(sum(task.name == "aclnnScatterPaKvCache" for task in traced))
    assert calls == [4 * (layers or 1), 2 * (layers or 1)]


@each_dtype
@pytest.mark.parametrize("slots", SLOTS, ids=str)
def test_the_operator(emulator, rng, dtype, slots):
    """Both caches in one call, of which every slot of a rank is counted: no more rows than the caches have."""
    caches = [random(rng, 3, 4, size, dtype=dtype) for size in (16, 8)]
    rows = [random(rng, len(slots), size, dtype=dtype) for size in (16, 8)]
    at = torch.tensor(slots, dtype=torch.int64)
    with emulator.tracing() as traced:
        got = on_device(WriteRowsPair(), *caches, *rows, at)
    assert sum(task.name == "aclnnScatterPaKvCache" for task in traced) == -(-len(slots) // 12)
    for ours, cache, new in zip(got, caches, rows, strict=True):
        close(ours, right(ops.WriteRows(), cache, new, at)[0])


def test_what_the_operator_does_not_take_is_refused(emulator):
    wide = [torch.zeros(shape).double() for shape in ((2, 4, 8), (2, 4, 4), (1, 8), (1, 4))]
    why = refused(WriteRowsPair(), *wide, torch.tensor([0]))
    assert why == "write_rows_pair: first: on ascend must be bf16, fp16 or fp32: got fp64"
    thin = [torch.zeros(shape) for shape in ((2, 4, 8), (2, 4, 0), (1, 8), (1, 0))]
    why = refused(WriteRowsPair(), *thin, torch.tensor([0]))
    assert why == "write_rows_pair: second: on ascend must have a block, a row and a feature: got fp32[2, 4, 0]"


def test_slots_are_checked_before_a_run():
    given = Setup()
    backend = backends.get("cpu", ranks=2)
    run = given.compiled(backend, schedule(lowered(given), orchestrations.serial))
    caches, hidden, batches = backend.put(given.arguments())
    slots = batches[0].slots.clone()
    slots[0] = 99
    with pytest.raises(InputError, match=r"slots: each must be -1 or in 0..47 .*: got 99"):
        run(caches, hidden, [batches[0]._replace(slots=slots), batches[1]])
