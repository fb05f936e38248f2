"""What our checks refuse before an operator is called; what the operators refuse is in `refusals`."""

import pytest
import torch

from mla_fx import backends
from mla_fx.backends.ascend.calls.projection import fits
from mla_fx.backends.ascend.emulator.releases import NEWEST, RELEASES
from mla_fx.effects import InputError, ops
from tests.backends.ascend.conftest import on_device
from tests.backends.ascend.legal import at, make

pytestmark = pytest.mark.usefixtures("emulator")


@pytest.mark.parametrize(
    ("heads", "inner", "features"),
    [(16, 512, 128), (127, 512, 128), (128, 512, 128), (4, 24, 16), (4, 16, 24), (1, 16, 16), (4096, 16, 16)],
)
def test_our_guard_is_the_operators_own(emulator, heads, inner, features):
    """`fits` says yes exactly where the operator of CANN 9.0 does; a newer one takes more."""
    given = {"input": at(3, heads, inner), "weight": at(heads, inner, features)}
    emulator.play(RELEASES["9.0"])
    try:
        if fits(heads, inner, features):
            assert make("product", given).shape == (3, heads, features)
        else:
            with pytest.raises(RuntimeError, match=r"K \* B must be below 65536|K and N must be multiples of 16"):
                make("product", given)
    finally:
        emulator.play(RELEASES[NEWEST])


def history(heads=2, latent=512, rope=64, size=16, columns=1, dtype=torch.bfloat16):
    parts = [torch.zeros(1, heads, width, dtype=dtype) for width in (latent, rope)]
    caches = [torch.zeros(2, size, width, dtype=dtype) for width in (latent, rope)]
    return *parts, *caches, torch.zeros(1, columns, dtype=torch.int32), (1,), (0,)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"latent": 256}, r"L: attention on ascend in torch.bfloat16 needs 512 \(other sizes run in fp32\): got 256"),
        ({"rope": 32}, r"R: attention on ascend in torch.bfloat16 needs 64 .*: got 32"),
        ({"heads": 129}, r"heads: attention on ascend takes 1 to 128: got 129"),
        ({"size": 24}, r"block_size: attention on ascend needs a multiple of 16 in 16..1024: got 24"),
        ({"size": 1040}, r"block_size: attention on ascend needs a multiple of 16 in 16..1024: got 1040"),
        ({"columns": 0}, r"table_width: attention on ascend needs at least 1 column of block_table: got 0"),
        ({"dtype": torch.float64}, r"q_latent: on ascend must be bf16, fp16 or fp32: got torch.float64"),
    ],
)
def test_history_attention_refuses(emulator, changed, message):
    operands = history(**changed)
    with emulator.tracing() as trace, pytest.raises(InputError, match=message):
        on_device(ops.HistoryAttention(0.1), *operands)
    assert not [task for task in trace if task.kind == "operator"]


def test_current_attention_refuses():
    q_latent, q_rope, *_ = history(heads=129)
    keys = [torch.zeros(1, width, dtype=torch.bfloat16) for width in (512, 64)]
    with pytest.raises(InputError, match="heads: attention on ascend takes 1 to 128: got 129"):
        on_device(ops.CurrentAttention(0.1), q_latent, q_rope, *keys, (1,))


@pytest.mark.parametrize(
    ("ranks", "latent", "message"),
    [
        (16, 8, "ranks: combine on ascend merges at most 15 and the local part: got 16"),
        (2, 12, r"L: combine on ascend needs a multiple of 8 in 8..512: got 12"),
        (2, 520, r"L: combine on ascend needs a multiple of 8 in 8..512: got 520"),
    ],
)
def test_combine_refuses(ranks, latent, message):
    recv = torch.zeros(ranks, 1, 1, latent + 1)
    with pytest.raises(InputError, match=message):
        on_device(ops.Combine(), recv, torch.zeros(1, 1, latent), torch.zeros(1, 1))


def test_the_seed_is_the_emulators():
    with pytest.raises(InputError, match="adversary: a run on npu has none: got seed 3"):
        backends.get("ascend", adversary=3)
