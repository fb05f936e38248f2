"""Attention over a latent, and over keys and values of heads: npu_fused_infer_attention_score_v2 in layout TND.

The operator takes bf16 and fp16, L = 512 with R = 64, one KV head, and 1, 2,
4, .. 128 query heads; other head counts are padded with zeros and trimmed.  In
float32, which it does not take, the same is computed with matrix products.
Of expanded keys it takes P = 128 with R = 64, V = 128, and any head count.

It writes 0 and LSE = +inf where a row sees no key, which is left: merges take
either infinity for none.  Rows that no request owns (padding) are not passed to
it: their output is 0, and their LSE what the rule says.  In a captured program
there are none, since a branch on lengths would stay as it was captured: there
padding has requests of its own.

History and current part share one workspace of the rank, which the program
keeps in order: so the operator is called by its `.out` form, in eager mode as
under capture.  The functional form would take a block of the wheel's for each
stream beside it.  What that costs is that op-plugin tiles such a call on the
host every time.  The workspace holds for all lengths over the shapes of a
program: the operator that says how large it must be looks at no length.
The first version of the operator, which is to go, is called nowhere: every
release here has the second.  Source: op-plugin and CANN 9.1 (ops-transformer), as far as public.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from mla_fx.backends.ascend.calls.dtypes import wrong_dtype
from mla_fx.backends.device import Run, Scratch
from mla_fx.effects import Aval

#: Query heads that the operator takes for L = 512.
HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
LATENT, ROPE, HEAD = 512, 64, 128
_MASK = 2048


def causal_mask(run: Run) -> torch.Tensor:
    """The operator's template for sparse_mode 3: 2048 x 2048, set strictly above the diagonal."""
    return run.constant("causal mask", lambda: torch.ones(_MASK, _MASK, dtype=torch.bool).triu_(1))


def takes(q_latent: Aval, q_rope: Aval) -> str | None:
    """Why attention cannot run on such queries; in 16 bits L, R and the heads are the operator's."""
    if why := wrong_dtype("q_latent", q_latent):
        return why
    if q_latent.dtype == "fp32":
        return None
    for name, got, wanted in (("L", q_latent.shape[2], LATENT), ("R", q_rope.shape[2], ROPE)):
        if got != wanted:
            return (
                f"{name}: attention on ascend in {q_latent.dtype} needs {wanted} (other sizes run in fp32): got {got}"
            )
    if not 1 <= q_latent.shape[1] <= HEADS[-1]:
        return f"heads: attention on ascend takes 1 to {HEADS[-1]}: got {q_latent.shape[1]}"
    return None


def expands(nope: int, rope: int, value: int) -> bool:
    """Whether the operator takes expanded keys and values of these features a head."""
    return (nope, rope, value) == (HEAD, ROPE, HEAD)


def expanded(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    k: torch.Tensor,
    k_rope: torch.Tensor,
    v: torch.Tensor,
    *,
    lengths: Sequence[int],
    workspace: Scratch,
    **how: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`q`, `k`, `v` [T, N, 128] and `q_rope`, `k_rope` [T, N, 64] -> output [T, N, 128] and LSE [T, N].

    A request's keys are its new tokens; both are 0 in rows that no request owns.  `how` as in `fused`.
    """
    real = sum(lengths)
    out, lse = torch.empty_like(v), v.new_empty(v.shape[:2], dtype=torch.float32)
    if real:
        into = [part[:real] for part in (out, lse)]
        _call([q.contiguous(), q_rope.contiguous()], (k, k_rope, v), into, (tuple(lengths),), workspace, how)
    if real < len(v):
        out[real:].zero_()
        lse[real:].zero_()
    return out, lse


def fused(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    *,
    host: tuple[tuple[int, ...], ...],
    workspace: Scratch,
    padding: float = math.inf,
    **how: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`q_latent` [T, H, L], `q_rope` [T, H, R] -> output [T, H, L] and LSE [T, H], `padding` where no request is.

    `host` are the lengths of the op: of each request's queries, and, with paging, of the keys that it sees; without
    they are its own.  `how` is passed on: scale, mask, paging.
    """
    tokens, heads = q_latent.shape[:2]
    out, lse = q_latent.new_empty(q_latent.shape), q_latent.new_empty((tokens, heads), dtype=torch.float32)
    real = sum(host[0])
    if real:
        size = next(count for count in HEADS if count >= heads)
        queries = [_padded(part, size) for part in (q_latent, q_rope)]
        into = (out, lse) if size == heads else (torch.empty_like(queries[0]), lse.new_empty((tokens, size)))
        _call(queries, (latent, k_rope, latent), [part[:real] for part in into], host, workspace, how)
        if size != heads:
            out.copy_(into[0][:, :heads])
            lse.copy_(into[1][:, :heads])
    if real < tokens:
        out[real:].zero_()
        lse[real:].fill_(padding)
    return out, lse


def updates(op: Any, q_latent: Aval, *operands: Any) -> str | None:
    """Why a captured call cannot be updated to these lengths: it is for all tokens of the step."""
    if q_latent.dtype == "fp32":
        return "its attention in fp32 is plain torch here, launches that depend on lengths (16 bits have an operator)"
    tokens, lengths = q_latent.shape[0], next((one for one in operands if isinstance(one, tuple)), None)
    if lengths is None or sum(lengths) == tokens:
        return None
    return (
        f"query_lengths: the sum must be T = {tokens}, tokens of padding being a request's: got {sum(lengths)}, from "
        f"{lengths}"
    )


def _padded(query: torch.Tensor, size: int) -> torch.Tensor:
    """`query` [T, heads, D] with zeros behind its heads: [T, size, D]."""
    heads = query.shape[1]
    if heads == size:
        return query.contiguous()
    padded = query.new_zeros((query.shape[0], size, query.shape[2]))
    padded[:, :heads].copy_(query)
    return padded


def _call(
    queries: Sequence[torch.Tensor],
    stored: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    into: Sequence[torch.Tensor],
    host: tuple[tuple[int, ...], ...],
    workspace: Scratch,
    how: dict[str, Any],
) -> None:
    """The operator, on the tokens that requests own.  Its scratch is the program's, not one it gets for itself."""
    npu, tokens, real = torch.ops.npu, queries[0].shape[0], len(into[0])
    paged = "block_table" in how
    other = "block_table" if paged else "atten_mask"
    options = {
        "num_query_heads": queries[0].shape[1],
        "num_key_value_heads": stored[0].shape[1],  # of a latent 1; the default means as many as query heads
        "input_layout": "TND",
        "return_softmax_lse": True,
        **{"softmax_scale" if name == "scale" else name: value for name, value in how.items() if name != other},
    }

    def given(tensors: Sequence[torch.Tensor], ends: list[int], kv: list[int]) -> tuple[Any, dict[str, Any]]:
        query, rope, key, k_rope, value, table_or_mask = tensors
        lists = {"actual_seq_qlen": ends, "actual_seq_kvlen": kv}
        named = {"query_rope": rope, "key_rope": k_rope, other: table_or_mask, **lists, **options}
        return (query, key, value), named

    def cut(count: int) -> list[torch.Tensor]:
        key, k_rope, value = stored if paged else (part[:count] for part in stored)
        return [*(part[:count] for part in queries), key, k_rope, value, how[other]]

    def most() -> int:  # bytes for the shapes of the program, whatever the lengths of this step
        requests = len(host[0])
        even = [tokens * (b + 1) // requests for b in range(requests)]
        full = [how["block_table"].shape[1] * how["block_size"]] * requests if paged else even
        tensors, named = given(cut(tokens), even, full)
        # As many elements as bytes are needed, but in the dtype of the queries.
        return int(npu._npu_fused_infer_attention_score_v2_get_max_workspace(*tensors, **named).numel())

    def issued(tensors: Sequence[torch.Tensor], host: tuple[tuple[int, ...], ...]) -> None:
        *tensors, room, out, lse = tensors
        ends = list(accumulate(host[0]))
        positional, named = given(tensors, ends, list(host[1]) if paged else ends)
        npu.npu_fused_infer_attention_score_v2.out(*positional, **named, workspace=room, out=[out, lse])

    table = tuple(how["block_table"].shape) if paged else ()
    room = workspace.room((queries[0].shape, queries[0].dtype, stored[0].shape, table, len(host[0])), most)
    out, lse = into
    workspace.device.issue(issued, (*cut(real), room, out, lse.unsqueeze(-1)), host)


def plain(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    *,
    scale: float,
    hidden: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One request: queries [S, H, ...] over keys [K, ...], K > 0, of which `hidden` [S, K] are masked out."""
    scores = (torch.matmul(q_latent, latent.t()) + torch.matmul(q_rope, k_rope.t())) * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden.unsqueeze(1), -math.inf)
    lse = torch.logsumexp(scores, -1)
    return torch.matmul(torch.exp(scores - lse.unsqueeze(-1)), latent), lse


def unseen(q_latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output 0 and LSE -inf for all queries, to be filled in for those that see keys."""
    return q_latent.new_zeros(q_latent.shape), q_latent.new_full(q_latent.shape[:2], -math.inf)
