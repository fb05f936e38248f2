"""Points 1 to 3: fused infer attention score over a latent, held against attention in float64."""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from attrs import frozen

from mla_fx.backends.ascend.calls.attention import LATENT, ROPE
from mla_fx.backends.ascend.probe.compare import BF16, WIDE, all_of, drawn, near, same
from mla_fx.backends.ascend.probe.point import Cann, Case, Outcome, Point, Site, Verdicts, failing, never

_SCALE = 192**-0.5
_MASK = 2048


@frozen(eq=False)
class _Call:
    """One call: its tensors (on the host), its other arguments, and what is right, in float64."""

    tensors: dict[str, torch.Tensor]
    how: dict[str, Any]
    out: torch.Tensor
    lse: torch.Tensor

    def on_device(self) -> dict[str, Any]:
        """Arguments of the operator; what is one tensor on the host is one there."""
        moved = {id(tensor): tensor.npu() for tensor in self.tensors.values()}  # type: ignore[attr-defined]
        return {**{name: moved[id(tensor)] for name, tensor in self.tensors.items()}, **self.how}


def _attend(q: torch.Tensor, c: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [S, N, L + R] over keys [K, L + R] of one request -> [S, N, L] and [S, N, 1]: 0 and inf without a key."""
    if not c.shape[0]:
        return q.new_zeros((*q.shape[:2], LATENT)), q.new_full((*q.shape[:2], 1), math.inf)
    scores = torch.einsum("snd,kd->snk", q, c) * _SCALE
    if causal:
        hidden = torch.ones(q.shape[0], c.shape[0], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden.unsqueeze(1), -math.inf)
    return torch.softmax(scores, -1) @ c[:, :LATENT], torch.logsumexp(scores, -1, keepdim=True)


def _call(
    heads: int, queries: Sequence[int], requests: Sequence[torch.Tensor], tensors: dict[str, torch.Tensor], **how: Any
) -> _Call:
    """`requests` are the keys [K, L + R] of each; `tensors` what the operator gets beside the queries."""
    q, ends = drawn(sum(queries), heads, LATENT + ROPE), list(accumulate(queries))
    causal = "atten_mask" in tensors
    rows = torch.split(q.double(), list(queries))
    found = [_attend(mine, c.double(), causal) for mine, c in zip(rows, requests, strict=True)]
    common = {
        "num_query_heads": heads,
        "num_key_value_heads": 1,
        "input_layout": "TND",
        "softmax_scale": _SCALE,
        "return_softmax_lse": True,
        "actual_seq_qlen": ends,
        **how,
    }
    given = {"query": q[..., :LATENT].contiguous(), "query_rope": q[..., LATENT:].contiguous(), **tensors}
    out, lse = (torch.cat(parts) for parts in zip(*found, strict=True))
    return _Call(given, common, out, lse)


def paged(*, heads: int = 16, size: int = 128, keys: Sequence[int] = (0, 5, 129)) -> _Call:
    """One query a request over its `keys` in blocks of `size`, in shuffled blocks, unmasked."""
    columns = max(-(-count // size) for count in keys)
    blocks = len(keys) * columns
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    cache, table = drawn(blocks, size, LATENT + ROPE, seed=2), order.view(len(keys), columns)
    requests = [cache[row.long()].flatten(0, 1)[:count] for row, count in zip(table, keys, strict=True)]
    latent, rope = cache[..., :LATENT].contiguous().unsqueeze(1), cache[..., LATENT:].contiguous().unsqueeze(1)
    tensors = {"key": latent, "value": latent, "key_rope": rope, "block_table": table}
    return _call(heads, [1] * len(keys), requests, tensors, block_size=size, sparse_mode=0, actual_seq_kvlen=list(keys))


def causal(queries: Sequence[int]) -> _Call:
    """Each request's new tokens over themselves, without paging, by the template of sparse mode 3."""
    keys = drawn(sum(queries), 1, LATENT + ROPE, seed=3)
    latent, rope = keys[..., :LATENT].contiguous(), keys[..., LATENT:].contiguous()
    mask = torch.ones(_MASK, _MASK, dtype=torch.bool).triu_(1)
    tensors = {"key": latent, "value": latent, "key_rope": rope, "atten_mask": mask}
    kvlen = list(accumulate(queries))
    return _call(16, queries, torch.split(keys[:, 0], list(queries)), tensors, sparse_mode=3, actual_seq_kvlen=kvlen)


def _functional(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = torch.ops.npu.npu_fused_infer_attention_score_v2(**given)
    return out, lse


def _agrees(call: _Call) -> Outcome:
    """Output and LSE of the rows that see a key."""
    out, lse = (part.cpu() for part in _functional(call.on_device()))
    seen = call.lse.isfinite()[:, 0, 0]
    if (out.shape, lse.shape) != (call.out.shape, call.lse.shape):
        return Outcome("differs", f"shapes: must be {call.out.shape}, {call.lse.shape}: got {out.shape}, {lse.shape}")
    found = near(BF16, out=(out[seen], call.out[seen])), near(WIDE, lse=(lse[seen], call.lse[seen]))
    return all_of(found)


def _without_keys(site: Site) -> Outcome:
    call = paged()
    out, lse = _functional(call.on_device())
    return near(0, out=(out[:1], call.out[:1]), lse=(lse[:1], call.lse[:1]))


def _given_room(site: Site) -> Outcome:
    """The form that writes into given results, with the workspace that the third one says: the same bits."""
    npu, given = torch.ops.npu, paged().on_device()
    wanted = _functional(given)
    room = npu._npu_fused_infer_attention_score_v2_get_max_workspace(**given)
    out, lse = map(torch.empty_like, wanted)
    npu.npu_fused_infer_attention_score_v2.out(**given, workspace=room, out=[out, lse])
    found = same(out=(out, wanted[0].cpu()), lse=(lse, wanted[1].cpu()))
    return Outcome(found.verdict, found.detail, {"workspace bytes": room.nbytes})


def _room_for_all(site: Site) -> Outcome:
    """The backend asks once for a shape, with the lengths of the first step."""
    asked = []
    for keys in ((1, 1, 129), (256, 256, 256)):
        given = paged(keys=keys).on_device()
        asked.append(torch.ops.npu._npu_fused_infer_attention_score_v2_get_max_workspace(**given).nbytes)
    figures = {"bytes for short lengths": asked[0], "bytes for full ones": asked[1]}
    return Outcome("holds" if asked[1] <= asked[0] else "differs", "", figures)


def _history_means(found: Verdicts, cann: Cann) -> str:
    said = []
    if "functional" in failing(found):
        said.append("calls/attention.py: history attention must not run here; use float32, which is plain torch.")
    if found["given results and workspace"] in ("differs", "refused", "faults"):
        said.append("calls/attention.py: call the functional form and copy, in place of .out with a workspace.")
    if found["one workspace for all lengths"] in ("differs", "refused", "faults"):
        said.append("calls/attention.py: ask for the workspace with the fullest lengths of a shape, not the first.")
    if "row without a key" in failing(found):
        said.append("A row without a key is not 0 with LSE +inf: keep the masks in front of the merge (combine.py).")
    return " ".join(said) or "History attention stays as it is; what it says of rows without a key may be relied on."


def _current_means(found: Verdicts, cann: Cann) -> str:
    bad = failing(found)
    few = [name for name in bad if int(name.split()[-1]) <= 16]
    if few:
        return f"current_attention.py: not by the operator without paging ({', '.join(few)}): page the new tokens."
    if bad:
        return f"Keep chunks to 16 new tokens a request (`mla-fx generate --chunk 16`): {', '.join(bad)} fails."
    return "Current attention stays without paging, for chunks of any length tried."


def _sizes_mean(found: Verdicts, cann: Cann) -> str:
    bad = failing(found)
    if not bad:
        return "Heads and block sizes stay as calls/attention.py and history_attention.py take them."
    return f"history_attention.py: `takes` must refuse {', '.join(bad)}, or pad the heads."


POINTS = (
    Point(
        1,
        "paged attention",
        "TND over pages, 0, 5 and 129 keys, against float64; written into given results, against the functional form",
        (
            Case("functional", lambda site: _agrees(paged())),
            Case("row without a key", _without_keys, never),
            Case("given results and workspace", _given_room),
            Case("one workspace for all lengths", _room_for_all),
        ),
        _history_means,
    ),
    Point(
        2,
        "attention without paging",
        "TND, sparse mode 3, a request of S new tokens beside one of 3, with LSE; documented up to 16 and with paging",
        tuple(Case(f"S = {s}", lambda site, s=s: _agrees(causal([s, 3]))) for s in (1, 2, 16, 17, 64)),  # type: ignore[misc]
        _current_means,
    ),
    Point(
        3,
        "heads and block sizes",
        "paged attention over 5 and 129 keys; documented are blocks of 16 and 128",
        tuple(
            Case(f"{n} heads, blocks of {s}", lambda site, n=n, s=s: _agrees(paged(heads=n, size=s, keys=(5, 129))))  # type: ignore[misc]
            for n in (1, 16, 128)
            for s in (16, 64, 128)
        ),
        _sizes_mean,
    ),
)
