"""Emulated attention: every layout and both versions by the definition, and what is written where nothing is seen."""

import math
from typing import Any

import pytest
import torch
from attrs import evolve, frozen

from tests.backends.ascend.conftest import random

pytestmark = pytest.mark.usefixtures("emulator")
HEADS, LATENT, ROPE, SIZE = 2, 512, 64, 16
SCALE = 0.07


@frozen
class Case:
    """Queries [B, S, N, D] of requests that have `keys[b]` keys, and what of both is hidden [B, S, K]."""

    query: torch.Tensor
    query_rope: torch.Tensor
    latent: torch.Tensor  # [B, K, 512]
    rope: torch.Tensor
    keys: tuple[int, ...]
    hidden: torch.Tensor

    def right(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [B, S, N, D] and LSE [B, S, N] by the definition; 0 and +inf without a key."""
        out = torch.zeros(self.query.shape, dtype=torch.float64)
        lse = torch.full(self.query.shape[:3], math.inf, dtype=torch.float64)
        for b, count in enumerate(self.keys):
            for s in range(self.query.shape[1]):
                seen = (~self.hidden[b, s, :count]).nonzero().flatten()
                for n in range(self.query.shape[2]):
                    c, k = self.latent[b, seen].double(), self.rope[b, seen].double()
                    scores = (c @ self.query[b, s, n].double() + k @ self.query_rope[b, s, n].double()) * SCALE
                    if len(seen):
                        lse[b, s, n] = torch.logsumexp(scores, 0)
                        out[b, s, n] = torch.softmax(scores, 0) @ c
        return out, lse


@pytest.fixture
def case(rng) -> Case:
    keys, queries = (37, 0, 16), 3
    shape = (len(keys), queries, HEADS)
    return Case(
        *(random(rng, *shape, size, dtype=torch.bfloat16) for size in (LATENT, ROPE)),
        *(random(rng, len(keys), max(keys), size, dtype=torch.bfloat16) for size in (LATENT, ROPE)),
        keys,
        torch.zeros(len(keys), queries, max(keys), dtype=torch.bool),
    )


def paged(part: torch.Tensor, axes: int = 4) -> torch.Tensor:
    """[B, K, D] in blocks that follow each other, with a block more a request and NaN where nothing is."""
    batch, keys, features = part.shape
    room = part.new_full((batch, (-(-keys // SIZE) + 1) * SIZE, features), math.nan)
    room[:, :keys] = part
    blocks = room.view(-1, SIZE, features)
    return (blocks.unsqueeze(1) if axes == 4 else blocks).npu()


def table(case: Case) -> dict[str, Any]:
    columns = -(-case.latent.shape[1] // SIZE) + 1
    ids = torch.arange(len(case.keys) * columns, dtype=torch.int32).view(len(case.keys), columns)
    return {"block_table": ids.npu(), "block_size": SIZE}


def put(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """[B, S, N, D] in the axes of a layout."""
    if layout == "BSH":
        return tensor.flatten(2).npu()
    if layout in ("TND", "NTD"):
        tensor = tensor.flatten(0, 1)
        return (tensor if layout == "TND" else tensor.transpose(0, 1)).contiguous().npu()
    return tensor.permute(["BSND".index(axis) for axis in layout]).contiguous().npu()


def ask(case: Case, layout: str = "BNSD", version: int = 1, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE in the axes of the layout, on the host."""
    out, lse = issue(case, layout, version, **how)
    return out.cpu(), lse.cpu()


def issue(case: Case, layout: str = "BNSD", version: int = 1, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    names = {
        "num_heads": HEADS,
        "num_key_value_heads": 1,
        "scale": SCALE,
        "input_layout": layout,
        "softmax_lse_flag": True,
        "query_rope": put(case.query_rope, layout.split("_")[0]),
        "actual_seq_lengths_kv": list(case.keys),
    } | how
    if layout.startswith("TND"):
        queries = case.query.shape[1]
        names["actual_seq_lengths"] = [queries * (b + 1) for b in range(len(case.keys))]
    if "key" in names:
        key = names.pop("key")
    else:
        key = paged(case.latent)
        names |= table(case) | {"key_rope": paged(case.rope)}
    call = torch.ops.npu.npu_fused_infer_attention_score
    if version == 2:
        call = torch.ops.npu.npu_fused_infer_attention_score_v2
        renamed = {
            "num_heads": "num_query_heads",
            "scale": "softmax_scale",
            "softmax_lse_flag": "return_softmax_lse",
            "actual_seq_lengths": "actual_seq_qlen",
            "actual_seq_lengths_kv": "actual_seq_kvlen",
        }
        names = {renamed.get(name, name): value for name, value in names.items()}
    found: tuple[torch.Tensor, torch.Tensor] = call(put(case.query, layout.split("_")[0]), key, key, **names)
    return found


def verify(case: Case, layout: str, got: tuple[torch.Tensor, torch.Tensor]) -> None:
    out, lse = case.right()
    want = put(out.to(torch.bfloat16), layout.split("_")[-1]).cpu()
    torch.testing.assert_close(got[0].double(), want.double(), rtol=2**-7, atol=1e-5)
    flat = lse.flatten(0, 1) if layout.startswith("TND") else lse.transpose(1, 2)
    torch.testing.assert_close(got[1], flat.float().unsqueeze(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD", "TND", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD", "TND_NTD"])
def test_every_layout_over_pages(release, case, layout, version):
    verify(case, layout, ask(case, layout, version))


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])
def test_batched_without_paging(case, layout):
    """Keys lie in the layout of the query, with one head; lengths may be left out."""
    keys = {"key": put(case.latent.unsqueeze(2), layout), "key_rope": put(case.rope.unsqueeze(2), layout)}
    verify(case, layout, ask(case, layout, **keys))
    whole = evolve(case, keys=(37, 37, 37))
    verify(whole, layout, ask(whole, layout, **keys, actual_seq_lengths_kv=None))
    verify(whole, layout, ask(whole, layout, **keys, actual_seq_lengths_kv=[37]))  # one for all


def test_pages_may_have_three_axes(case):
    how = {"key": paged(case.latent, axes=3), "key_rope": paged(case.rope, axes=3), **table(case)}
    verify(case, "BSND", ask(case, "BSND", **how))


def test_queries_behind_the_length_of_a_request_are_0_and_infinite(case):
    """With one place a request the lengths are not looked at."""
    out, lse = ask(case, "BSND", actual_seq_lengths=[2, 3, 0])
    assert not out[0, 2].any() and not out[2].any() and lse[0, :, 2].isposinf().all() and lse[2].isposinf().all()
    whole = ask(case, "BSND")
    assert torch.equal(out[0, :2], whole[0][0, :2])
    one = evolve(case, query=case.query[:, :1], query_rope=case.query_rope[:, :1], hidden=case.hidden[:, :1])
    verify(one, "BSND", ask(one, "BSND", actual_seq_lengths=[0]))


@pytest.mark.parametrize("axes", [3, 4])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.uint8], ids=str)
def test_a_mask_hides_keys(case, rng, axes, dtype):
    hidden = torch.as_tensor(rng.random((3, 3, 37)) < 0.5)
    hidden[..., 0] = False
    masked = evolve(case, hidden=hidden)
    mask = torch.ones(3, 3, 48, dtype=torch.bool)
    mask[..., :37] = hidden
    mask = mask.to(dtype).npu()
    verify(masked, "BSND", ask(masked, "BSND", atten_mask=mask if axes == 3 else mask.unsqueeze(1)))


@pytest.mark.parametrize("inner_precise", [0, 1, 2, 3])
def test_a_row_whose_keys_are_all_masked(case, inner_precise):
    """A plain average with an LSE of -1e12; with bit 1 of inner_precise 0 and +inf."""
    mask = torch.zeros(3, 3, 48, dtype=torch.bool)
    mask[0, 1] = True
    out, lse = ask(case, "BSND", atten_mask=mask.npu(), inner_precise=inner_precise)
    if inner_precise & 2:
        assert not out[0, 1].any() and lse[0, :, 1].isposinf().all()
    else:
        mean = case.latent[0].double().mean(0).expand(HEADS, -1)
        torch.testing.assert_close(out[0, 1].double(), mean, rtol=2**-7, atol=1e-5)
        torch.testing.assert_close(lse[0, :, 1], torch.full((HEADS, 1), -1e12))
    verify(evolve(case, keys=(37, 0, 16)), "BSND", ask(case, "BSND"))


def test_causal_over_the_local_keys(case):
    """The corner of the template lies at the last query and the last key of each request."""
    hidden = torch.zeros(3, 3, 37, dtype=torch.bool)
    for b, count in enumerate(case.keys):
        for s in range(3):
            hidden[b, s, max(count - 2 + s, 0) :] = True
    template = torch.ones(2048, 2048, dtype=torch.bool).triu(1).npu()
    masked = evolve(case, hidden=hidden)
    for layout in ("BNSD", "TND"):
        verify(masked, layout, ask(masked, layout, sparse_mode=3, atten_mask=template))


def test_an_empty_key_is_not_looked_at(case):
    empty = {"key": torch.empty(0, 1, SIZE, LATENT, dtype=torch.bfloat16, device="npu")}
    empty |= {"key_rope": empty["key"][..., :ROPE], **table(case)}
    out, lse = ask(evolve(case, keys=(0, 0, 0)), "BNSD", **empty)
    assert not out.any() and lse.isposinf().all()


def test_without_an_lse(case):
    _, lse = ask(case, softmax_lse_flag=False)
    assert lse.numel() == 0


def test_block_ids_are_not_checked_but_fault(emulator, case):
    wild = {"block_table": torch.full((3, 4), 99, dtype=torch.int32).npu(), "block_size": SIZE}
    issue(case, key=paged(case.latent), key_rope=paged(case.rope), **wild)
    with pytest.raises(RuntimeError, match=r"block_table: ids must be in 0\.\.11: got \[99, 99, 99\]"):
        emulator.synchronize()


def test_a_workspace_that_is_too_small_faults(emulator, case):
    """As when a program was compiled for a step that needed less."""
    query, rope = put(case.query, "BNSD"), put(case.query_rope, "BNSD")
    results = [torch.empty_like(query), torch.empty(3, HEADS, 3, 1, device="npu")]
    torch.ops.npu.npu_fused_infer_attention_score.out(
        query,
        paged(case.latent),
        paged(case.latent),
        query_rope=rope,
        key_rope=paged(case.rope),
        num_heads=HEADS,
        num_key_value_heads=1,
        input_layout="BNSD",
        actual_seq_lengths_kv=list(case.keys),
        softmax_lse_flag=True,
        **table(case),
        workspace=torch.empty(16, dtype=torch.uint8, device="npu"),
        out=results,
    )
    with pytest.raises(RuntimeError, match="workspace: must have 20832 bytes: got 16"):
        emulator.synchronize()
