"""No CUDA rule waits for the device: each runs on tensors without data, at the sizes of DeepSeek-V3."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_fx.backends import Device, cuda
from mla_fx.backends.cuda import grouped_linear
from mla_fx.backends.cuda.calls import product
from mla_fx.effects import ops
from mla_fx.effects.op import stem
from tests.backends.bare import WaitError, Watch, ask
from tests.backends.sizes import RANKS, TOKENS, Step, cases
from tests.cases import each, pairwise
from tests.ops.conftest import aval

#: All but those that say that they wait.
each_op = pytest.mark.parametrize("op", [op for op in ops.ALL if not op.waits], ids=stem)
#: Ops whose rules call something that CUDA has and a CPU has not.
OTHERWISE = (ops.Linear, ops.AbsorbQuery, ops.VUp, ops.GateLogits, ops.GroupedLinear)


def verify(op, step):
    """Shapes, dtypes and strides of the results are those of the op, on tensors without data."""
    for case in cases(op, step):
        device = Device("meta")
        if op is ops.RopeAngles:  # what is sent to the device once and for all, sent
            ask(cuda.TABLE.rules[op], case, ranks=step.ranks, device=device)
        with Watch() as watch:
            results = ask(cuda.TABLE.rules[op], case, ranks=step.ranks, device=device)
        for of_rank in results:
            assert tuple(map(aval, of_rank)) == case.op.infer(*case.avals)
            parts = (result[:1] if op.communicates else result for result in of_rank)  # of a collective, rank by rank
            assert all(part.is_contiguous() for part in parts)
    return watch.called


@each_op
@each(
    ("ranks", "tokens", "dtype"),
    [(1, 64, "bf16"), (8, 64, "fp32"), (8, 1, "bf16"), (1, 1, "fp64"), (8, 0, "fp16"), (1, 0, "fp32")],
)
def test_nothing_is_read_and_nothing_made_on_the_host(op, ranks, tokens, dtype):
    verify(op, Step(ranks, tokens, dtype))


@pytest.mark.soak
@each_op
@each(*pairwise(ranks=(1, 8), tokens=(0, 1, 64), dtype=("bf16", "fp16", "fp32", "fp64")))
def test_nothing_is_read_in_any_step(op, ranks, tokens, dtype):
    verify(op, Step(ranks, tokens, dtype))


@pytest.mark.parametrize("op", OTHERWISE, ids=stem)
@each(*pairwise(ranks=RANKS, tokens=TOKENS, dtype=("bf16", "fp16")))
def test_what_only_a_gpu_is_asked(monkeypatch, op, ranks, tokens, dtype):
    """Sums in float32 where torch can be asked for them, and the grouped product."""
    monkeypatch.setattr(product, "widens", lambda x: x.dtype.itemsize == 2)
    monkeypatch.setattr(grouped_linear, "grouped_product_takes", lambda rows, _: rows.dtype == torch.bfloat16)
    wanted = {"aten::mm.dtype", "aten::bmm.dtype"}
    if op is ops.GroupedLinear and dtype == "bf16":
        wanted = {"aten::_grouped_mm.default"}
    assert len(wanted.intersection(verify(op, Step(ranks, tokens, dtype)))) == 1


@each_op
def test_traces_with_fake_tensors(op):
    """A branch on a number of the device fails here."""
    step = Step(4, 6)
    with FakeTensorMode():
        for case in cases(op, step):
            for of_rank in ask(cuda.TABLE.rules[op], case, ranks=4, device=Device("cpu")):
                assert tuple(map(aval, of_rank)) == case.op.infer(*case.avals)


FAULTS = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "int": lambda x: int(x.sum()),
    "if": lambda x: 1 if (x > 0).any() else 0,
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "write through a mask": lambda x: x.__setitem__(x > 0, 1),
    "equal": lambda x: torch.equal(x, x + 1),
    "bincount": lambda x: x.bincount(),
    "unique": lambda x: x.unique(),
    "repeats": lambda x: torch.repeat_interleave(x),
    "copy to the host": lambda x: x.cpu(),
    "made on the host": lambda x: x + torch.arange(3).sum().to("meta"),
    "sent from the host": lambda x: x + torch.tensor([1, 2, 3]).to("meta"),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_what_waits_is_found(fault):
    with pytest.raises((WaitError, RuntimeError, NotImplementedError)), Watch():
        fault(torch.empty(3, dtype=torch.int64, device="meta"))
