"""The rotation: three launches beside wide angles, one beside rounded ones, and what their rounding costs."""

import pytest
import torch

from mla_fx import MlaConfig
from mla_fx.backends import Run, reference
from mla_fx.effects import ops
from mla_fx.rope import frequencies
from tests.backends.ascend.conftest import close, on_device, random
from tests.backends.ascend.test_rules import right

pytestmark = pytest.mark.usefixtures("emulator")
F = frequencies(MlaConfig.deepseek_v3())


def launches(emulator, op, *operands) -> list[str]:
    with emulator.tracing() as traced:
        on_device(op, *operands)
    return [task.name for task in traced if task.kind == "operator"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [None, 2])
def test_launches(emulator, rng, dtype, heads):
    x, turn = random(rng, 3, (heads or 1) * 192, dtype=dtype), random(rng, 3, 64, dtype=torch.float32)
    wide = launches(emulator, ops.Rope(heads), x, turn.cos(), turn.sin())
    assert wide == ["aclnnInplaceCopy", "aclnnRotaryPositionEmbeddingV2", "aclnnInplaceCopy"]
    rounded = launches(emulator, ops.Rope(heads), x, turn.cos().to(dtype), turn.sin().to(dtype))
    assert rounded == ["aclnnInplaceCopy", "aclnnInterleaveRope"]  # heads lie apart, which the operator does not take
    alone = launches(emulator, ops.Rope(heads), x[:, : (heads or 1) * 64], *(turn.to(dtype),) * 2)
    assert alone[-1:] == ["aclnnInterleaveRope"]


@pytest.mark.parametrize(("features", "heads"), [(896, 2), (64, 1000)])
def test_what_the_operators_do_not_take(release, rng, features, heads):
    x, turn = random(rng, 2, heads * features, dtype=torch.bfloat16), random(rng, 2, features, dtype=torch.float32)
    for angles in ((turn.cos(), turn.sin()), (turn.cos().bfloat16(), turn.sin())):
        (got,) = on_device(ops.Rope(heads), x, *angles)
        close(got, right(ops.Rope(heads), x, *angles)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_rounded_angles_cost(rng, dtype):
    """One rounding more of a rotated feature: 1.3 times the error, at positions up to 163840."""
    positions = torch.as_tensor(rng.integers(0, 163840, 1024))
    x, like = random(rng, 1024, 64, dtype=dtype), torch.empty(1024, 1, dtype=dtype)
    rules, given = reference.TABLE.rules, {"frequencies": F, "magnitude": 1.0, "rounded": False}
    angles = rules[ops.RopeAngles](positions, like.double(), run=Run(), **given)
    (exact,) = rules[ops.Rope](x.double(), *angles, run=Run(), heads=None)
    errors = []
    for rounded in (False, True):
        turned = on_device(ops.RopeAngles(F, 1.0, rounded), positions, like)
        (got,) = on_device(ops.Rope(None), x, *turned)
        errors.append(((got.double() - exact).square().mean() / exact.square().mean()).sqrt().item())
    assert errors[0] < 2 ** {torch.bfloat16: -9, torch.float16: -12}[dtype]
    assert 1.2 < errors[1] / errors[0] < 1.4
