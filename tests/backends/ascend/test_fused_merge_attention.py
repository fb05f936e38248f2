"""The merge of what attention gave as one operator: found where it comes straight from attention, the same numbers."""

import math

import pytest
import torch

from mla_fx.backends.ascend.fused import merge_attention
from mla_fx.backends.ascend.fused.merge_attention import MergeAttention
from mla_fx.effects import Aval, Group, bind, on_host, ops, trace
from tests.backends.ascend.conftest import close, on_device, random, to_device, with_gaps
from tests.backends.ascend.test_rules import right
from tests.setups import Setup

W, GROUP = 2, Group("dcp", 2)
Q, R = Aval((3, 4, 16), "fp32"), Aval((3, 4, 8), "fp32")
OWN, OWN_R = Aval((3, 2, 16), "fp32"), Aval((3, 2, 8), "fp32")
PARTS = {"latent": Aval((3, 16), "fp32"), "rope": Aval((3, 8), "fp32")}
CACHES = {"latents": Aval((3, 4, 16), "fp32"), "ropes": Aval((3, 4, 8), "fp32"), "table": Aval((1, 2), "int32")}
LENGTHS = Aval((1,), "int64")


def merged(how: str):
    """A step that merges what attention gave, or something else."""

    def merge(q, r, own, own_r, latent, rope, latents, ropes, table, query, history):
        hist, hist_lse = bind(ops.HistoryAttention(0.1), q, r, latents, ropes, table, query, history)
        cur, cur_lse = bind(ops.CurrentAttention(0.1), own, own_r, latent, rope, query)
        if how == "an output from elsewhere is sent":
            hist = q
        recv, recv_lse = bind(ops.AllToAll(GROUP), hist, hist_lse)
        if how == "an LSE from another exchange":
            _, recv_lse = bind(ops.AllToAll(GROUP), hist, hist_lse)
        if how == "another output is the local one":
            cur = own
        return bind(ops.Combine(), recv, recv_lse, cur, cur_lse)

    given = {"q": Q, "r": R, "own": OWN, "own_r": OWN_R, **PARTS, **CACHES}
    return trace(merge, "merged", **given, query=on_host(LENGTHS), history=on_host(LENGTHS))


def found(step):
    return [type(equation.op) for equation in merge_attention.find(step).equations]


def test_it_is_found_where_the_parts_come_from_attention():
    assert found(merged(""))[-1] is MergeAttention
    assert found(Setup(layers=2).step).count(MergeAttention) == 2


@pytest.mark.parametrize(
    "how", ["an output from elsewhere is sent", "an LSE from another exchange", "another output is the local one"]
)
def test_other_parts_are_left_alone(how):
    step = merged(how)
    assert merge_attention.find(step) == step and found(step)[-1] is ops.Combine


def parts(rng, dtype, ranks, tokens=3, heads=2, latent=16):
    """Some parts without a key, which are 0, as attention leaves them; the last row is nobody's."""
    recv = random(rng, ranks, tokens, heads, latent, dtype=dtype)
    lse = random(rng, ranks, tokens, heads, dtype=torch.float32) * 20
    local, local_lse = random(rng, tokens, heads, latent, dtype=dtype), random(rng, tokens, heads, dtype=torch.float32)
    lse[0, 0], lse[:, -1], lse[-1, 1, 0] = -math.inf, -math.inf, math.inf
    recv[lse.isinf()] = 0
    local[-1], local_lse[-1] = 0, 0
    return recv, lse, local, local_lse


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 8, 15, 16, 40])
def test_the_operator(release, emulator, rng, dtype, ranks):
    """Against the formula; one call and nothing else, as far as the release takes the parts, whatever their layout."""
    given = parts(rng, dtype, ranks)
    with emulator.tracing() as traced:
        (got,) = on_device(MergeAttention(), *given)
    close(got, right(ops.Combine(), *given)[0])
    assert not got[-1].any()
    names = [task.name for task in traced if task.kind == "operator"]
    fits = ranks + 1 <= (128 if release == "9.1" else 16)
    assert (names == ["aclnnAttentionUpdate"]) is fits and "aclnnAttentionUpdate" in names
    (strided,) = on_device(MergeAttention(), *given, layout=with_gaps)
    assert torch.equal(strided, got)


@pytest.mark.parametrize("latent", [12, 520])
def test_any_features(emulator, rng, latent):
    """As `ops.Combine`: those that the operator does not take, in slices and padded."""
    given = parts(rng, torch.float32, 2, latent=latent)
    close(on_device(MergeAttention(), *given)[0], right(ops.Combine(), *given)[0])


def test_what_has_arrived_is_read_where_it_lies(emulator, rng):
    """Gaps between ranks cost nothing: every part is contiguous."""
    recv, lse, local, local_lse = (to_device(part) for part in parts(rng, torch.bfloat16, 3))
    room = torch.zeros(3, recv[0].numel() + 64, dtype=recv.dtype, device="npu")
    apart = room[:, : recv[0].numel()].view(recv.shape).copy_(recv)
    with emulator.tracing() as traced:
        merge_attention.rule(apart, lse, local, local_lse, run=None)
    (task,) = [task for task in traced if task.kind == "operator"]
    assert task.kernels == 1


def test_no_tokens(emulator):
    recv, lse = torch.zeros(2, 0, 2, 16), torch.zeros(2, 0, 2)
    (got,) = on_device(MergeAttention(), recv, lse, recv[0], lse[0])
    assert got.shape == (0, 2, 16)
