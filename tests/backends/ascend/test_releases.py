"""What the releases of CANN differ in, beside what they refuse: results, and what is left unwritten."""

import itertools
import math

import pytest
import torch

from mla_fx.backends.ascend.emulator import emulate
from mla_fx.backends.ascend.emulator.operators import operators
from mla_fx.backends.ascend.emulator.releases import NEWEST, RELEASES
from mla_fx.effects import InputError
from tests.backends.ascend.conftest import close, random

INF, NAN = math.inf, math.nan


def test_operators_have_one_signature_in_all_releases():
    """The wheel passes the arguments of its own."""
    tables = [{name: it.signature for name, it in operators(release).items()} for release in RELEASES.values()]
    assert all(table == tables[0] for table in tables)


@pytest.mark.cann(NEWEST)
def test_a_release_is_kept_until_another_is_asked_for(emulator):
    with pytest.raises(InputError, match=r"cann: must be one of 8\.5, 9\.0, 9\.1: got 8\.4"):
        emulate(cann="8.4")
    assert emulator.release == RELEASES[NEWEST]
    assert emulate(cann="8.5").release.version == "8.5.0"
    assert emulate(seed=3).release.version == "8.5.0"
    assert emulate(cann=NEWEST).release == RELEASES[NEWEST]


# --- routing --------------------------------------------------------------------------


def route(active_num: int, **how):
    x = torch.arange(1.0, 4.0).repeat(4, 1).t().contiguous().npu()
    experts = torch.tensor([[0, 5], [1, 0], [4, 1]], dtype=torch.int32).npu()
    found = torch.ops.npu.npu_moe_init_routing_v2(
        x,
        experts,
        active_num=active_num,
        expert_num=8,
        active_expert_range=[0, 4],
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        **how,
    )
    return [part.cpu() for part in found]


@pytest.mark.parametrize("active_num", [-1, 6])
def test_rows_that_routing_copies(release, active_num):
    """8.5 leaves every row unwritten where active_num is -1, while index and counts look right."""
    rows, index, counts, _ = route(active_num)
    assert index.tolist() == [0, -1, 2, 1, -1, 3] and counts.tolist() == [2, 2, 0, 0]
    copied = 0 if release == "8.5" and active_num == -1 else 4
    assert rows[:copied, 0].tolist() == [1.0, 2.0, 2.0, 3.0][:copied]
    assert rows[copied:].isnan().all()


@pytest.mark.cann(NEWEST)
def test_newer_releases_route_as_many_rows_as_they_are_asked_for():
    rows, _, counts, _ = route(3)
    assert rows[:3, 0].tolist() == [1.0, 2.0, 2.0] and rows[3:].isnan().all() and counts.tolist() == [2, 2, 0, 0]
    assert not route(0)[0][:4].isnan().any()


# --- merge ----------------------------------------------------------------------------


def merge(
    lse: list[list[float]], parts: torch.Tensor, update_type: int = 1
) -> tuple[torch.Tensor, torch.Tensor | None]:
    given = [torch.tensor(one).npu() for one in lse]
    out, merged = torch.ops.npu.npu_attention_update(given, list(parts.npu()), update_type)
    return out.cpu(), merged.cpu() if update_type == 1 else None


@pytest.mark.parametrize("count", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_parts_are_weighed_by_their_lse(release, rng, dtype, count):
    parts, lse = random(rng, count, 5, 8, dtype=dtype), torch.as_tensor(rng.standard_normal((count, 5)) * 4).float()
    lse[0, 1:3] = torch.tensor([INF, -INF]) if count > 1 else lse[0, 1:3]
    out, merged = merge(lse.tolist(), parts)
    weights = torch.softmax(lse.double().masked_fill(lse.isinf(), -INF), 0)
    close(out, (weights.unsqueeze(-1) * parts.double()).sum(0))
    close(merged, torch.logsumexp(lse.double().masked_fill(lse.isinf(), -INF), 0))
    assert torch.equal(merge(lse.tolist(), parts, 0)[0], out)


@pytest.mark.parametrize(("first", "second"), list(itertools.product([0.5, INF, -INF, NAN], repeat=2)))
def test_what_infinite_lses_and_nan_do(release, first, second):
    """Both infinities are weight 0, a NaN spoils its row, and a row without any weight is NaN."""
    out, merged = merge([[first], [second]], torch.stack((torch.full((1, 8), 2.0), torch.full((1, 8), 4.0))))
    finite = [(2.0, first), (4.0, second)]
    seen = [value for value, lse in finite if math.isfinite(lse)]
    if math.isnan(first) or math.isnan(second) or not seen:
        assert out.isnan().all() and (merged.isnan().all())
    else:
        assert out[0, 0] == sum(seen) / len(seen) and merged.isfinite().all()


def test_nan_of_weight_0_is_not_washed_out(release):
    out, _ = merge([[-INF], [0.0]], torch.stack((torch.full((1, 8), NAN), torch.ones(1, 8))))
    assert out.isnan().all()


@pytest.mark.cann(NEWEST)
def test_more_than_16_parts_run_in_chunks_that_start_from_zeros(rng):
    """So a row without any weight is 0 there, and NaN with 16."""
    parts = random(rng, 128, 2, 8, dtype=torch.float32)
    lse = [[INF, float(part % 5)] for part in range(128)]
    out, _ = merge(lse, parts)
    assert not out[0].any()
    weights = torch.softmax(torch.tensor([one[1] for one in lse], dtype=torch.float64), 0)
    close(out[1], (weights.unsqueeze(-1) * parts[:, 1].double()).sum(0))
    assert merge(lse[:16], parts[:16])[0][0].isnan().all()


# --- transposing product --------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("heads", "inner", "features", "since"),
    [(4, 128, 256, "8.5"), (4, 192, 512, "9.0"), (127, 512, 16, "9.0"), (128, 512, 16, "9.1"), (3, 20, 12, "9.1")],
)
def test_products_that_a_release_takes(emulator, rng, dtype, heads, inner, features, since):
    x = (random(rng, 3, heads, inner, dtype=torch.float64) / inner).to(dtype)
    weight = random(rng, heads, inner, features, dtype=dtype)
    right = torch.einsum("thk,hkf->thf", x.double(), weight.double())
    product = torch.ops.npu.npu_transpose_batchmatmul
    for release in list(RELEASES.values())[list(RELEASES).index(since) :]:  # the newest last
        emulator.play(release)
        close(product(x.npu(), weight.npu(), perm_x1=(1, 0, 2)).cpu(), right)
        close(product(x.transpose(0, 1).npu(), weight.npu()).cpu(), right)  # batch entries first
    turned = weight.transpose(1, 2).contiguous().npu()
    close(product(x.npu(), turned, perm_x1=(1, 0, 2), perm_x2=(0, 2, 1)).cpu(), right)
