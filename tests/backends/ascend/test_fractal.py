"""Weights in FRACTAL_NZ: how they lie, which are brought into it, and that no number changes."""

import ctypes
from importlib import import_module
from itertools import product

import numpy as np
import pytest
import torch

from mla_fx import backends
from mla_fx.backends import ascend
from mla_fx.backends.ascend.calls.fractal import fractal, is_fractal, plain
from mla_fx.backends.ascend.fused.quant_experts import QuantExperts
from mla_fx.backends.ascend.fused.quant_mlp import QuantMlp
from mla_fx.effects import Group, Op, ops
from tests.backends.ascend.conftest import ask, random, to_device
from tests.backends.ascend.experts import Experts, Run

pytestmark = pytest.mark.usefixtures("emulator")
newest = pytest.mark.cann("9.1")
ALLOW = "ALLOW_INTERNAL_FORMAT"


def integers(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.as_tensor(rng.integers(-128, 128, shape, dtype=np.int8))


def scales(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.as_tensor(rng.random(shape, dtype=np.float32)) / 127


@newest
def test_how_it_lies(emulator, rng):
    """Columns of blocks, of 16 rows and 32 bytes, number by number."""
    experts, features, inner = 2, 64, 48
    weight = integers(rng, experts, features, inner)
    made = fractal(weight.npu())
    emulator.synchronize()
    assert is_fractal(made) and made.shape == weight.shape
    memory = np.frombuffer((ctypes.c_int8 * weight.numel()).from_address(made.data_ptr()), dtype=np.int8)
    blocks = memory.reshape(experts, features // 32, inner // 16, 16, 32)
    for e, f, d in product(range(experts), range(features), range(inner)):
        assert blocks[e, f // 32, d // 16, d % 16, f % 32] == weight[e, f, d]


@newest
def test_it_can_be_undone(rng):
    weight = integers(rng, 64, 48)
    assert not is_fractal(plain(fractal(weight.npu())))
    assert torch.equal(plain(fractal(weight.npu())).cpu(), weight)


def test_what_is_brought_into_it(release, rng):
    """By the newest release, and where blocks are full; the option of the wheel is as it was."""
    options = torch.npu.config
    for allowed in (False, True):
        options.allow_internal_format = allowed
        found = {
            shape: is_fractal(fractal(integers(rng, *shape).npu()))
            for shape in ((64, 48), (3, 32, 16), (48, 48), (64, 40), (0, 48))
        }
        assert [*found.values()] == [release == "9.1", release == "9.1", False, False, False]
        assert import_module("torch_npu")._C._npu_getOption(ALLOW) == (b"enable" if allowed else b"disable")
    options.allow_internal_format = False


def cases(rng: np.random.Generator, dtype: torch.dtype) -> list[tuple[Op, list[torch.Tensor]]]:
    """Every op that wants 8-bit weights in the form, with its operands."""
    x, rows = random(rng, 3, 64, dtype=dtype), random(rng, 6, 64, dtype=dtype)
    counts = torch.tensor([4, 2])
    mlp = [integers(rng, 128, 64), scales(rng, 128), integers(rng, 32, 64), scales(rng, 32)]
    chosen = torch.tensor([[0, 3], [1, 0], [2, 1]], dtype=torch.int32)
    two = [integers(rng, 2, 128, 64), scales(rng, 2, 128), integers(rng, 2, 64, 64)]
    last = scales(rng, 2, 64).to(torch.bfloat16)
    found = [
        (ops.QuantLinear(), [x, integers(rng, 32, 64), scales(rng, 32)]),
        (ops.QuantGroupedLinear(), [rows, integers(rng, 2, 32, 64), scales(rng, 2, 32), counts]),
    ]
    if dtype != torch.float32:
        found.append((QuantMlp(), [x, *mlp]))
    if dtype == torch.bfloat16:
        found.append((QuantExperts(2, Group("ep", 2)), [x, chosen, *two, last]))
    return found


@newest
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_no_bit_changes(rng, dtype):
    for op, operands in cases(rng, dtype):
        wanted = [name for name, form in ascend.TABLE.forms[type(op)].items() if form is fractal]
        given = dict(zip(op.operands, map(to_device, operands), strict=True))
        formed = {name: fractal(x) if name in wanted else x for name, x in given.items()}
        assert wanted and all(is_fractal(formed[name]) for name in wanted)
        for one, other in zip(ask(op, *given.values()), ask(op, *formed.values()), strict=True):
            written = 4 if isinstance(op, QuantExperts) and one.is_floating_point() else None
            assert torch.equal(one[:written].cpu(), other[:written].cpu()), op


@newest
def test_parameters_are_kept_in_it_alone(emulator):
    """8-bit weights that fill blocks, by the preparation; steps cast no format."""
    given = Experts(quantization="w8a8", shared=1, ranks=1)
    backend = backends.get("ascend", ranks=1)
    step = backend.lower(given.step)
    prepared = backend.prepare(step, given.params())
    eight = {name for name, (leaf,) in prepared.leaves.items() if leaf.dtype == torch.int8}
    assert len(eight) == 4 and all(is_fractal(prepared.leaves[name][0]) for name in eight)
    assert eight <= set(prepared.kept)
    run = Run(given, backend, step)
    run()
    with emulator.tracing() as trace:
        run.program(run.x)
    assert not [task for task in trace if task.name == "aclnnNpuFormatCast"]
