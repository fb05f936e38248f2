"""What is right, from the definition: dense attention over the sequence nobody has cut, in float64.

Nothing here uses the code under test.
"""

import math
import operator
from collections.abc import Sequence

import torch


def dense_causal(
    q_latent: torch.Tensor, q_rope: torch.Tensor, c: torch.Tensor, k_rope: torch.Tensor, scale: float
) -> torch.Tensor:
    """The last n tokens of one sequence attend to all tokens up to themselves.

    `q_latent` [n, H, L], `q_rope` [n, H, R], `c` [S, L], `k_rope` [S, R] -> [n, H, L], all float64:
    softmax_j(scale (q_latent . c_j + q_rope . k_rope_j)) c_j over j <= S - n + i.
    """
    new, total = q_latent.shape[0], c.shape[0]
    out = torch.empty_like(q_latent)
    for i in range(new):
        seen = total - new + i + 1
        s = scale * (q_latent[i] @ c[:seen].T + q_rope[i] @ k_rope[:seen].T)
        out[i] = torch.softmax(s, dim=-1) @ c[:seen]
    return out


def single_pass(
    q_latent: torch.Tensor, q_rope: torch.Tensor, c: torch.Tensor, k_rope: torch.Tensor, scale: float
) -> torch.Tensor:
    """The same in one pass in the tensors' own dtype, as an eager model computes it.

    Scores and output are matmuls in that dtype, softmax is in float32 and its weights are rounded to the dtype.
    """
    new, total = q_latent.shape[0], c.shape[0]
    q, k = torch.cat([q_latent, q_rope], dim=-1), torch.cat([c, k_rope], dim=-1)
    s = (q.flatten(0, 1) @ k.T).view(new, -1, total) * scale
    hidden = torch.ones(new, total, dtype=torch.bool).triu(total - new + 1)
    s = s.masked_fill(hidden[:, None], -torch.inf)
    weights = torch.softmax(s, dim=-1, dtype=torch.promote_types(c.dtype, torch.float32)).to(c.dtype)
    return (weights.flatten(0, 1) @ c).view_as(q_latent)


def owner_by_walking(length: int, ranks: int, interleave: int) -> list[int]:
    """The owner of every position, dealt out like cards: `interleave` positions a rank, round and round."""
    owners: list[int] = []
    while len(owners) < length:
        for rank in range(ranks):
            owners += [rank] * interleave
    return owners[:length]


def attend(
    q_latent: Sequence[float],
    q_rope: Sequence[float],
    keys: Sequence[tuple[Sequence[float], Sequence[float]]],
    scale: float,
) -> tuple[list[float], float]:
    """One token, one head, over `keys`, pairs of latent and rotated key: softmax-weighted latent, and LSE."""
    s = []
    for c, k_rope in keys:
        pairs = [*zip(q_latent, c, strict=True), *zip(q_rope, k_rope, strict=True)]
        s.append(scale * math.fsum(a * b for a, b in pairs))
    if not s:
        return [0.0] * len(q_latent), -math.inf
    most = max(s)
    weights = [math.exp(x - most) for x in s]
    total = math.fsum(weights)
    lse = most + math.log(total)
    latents = zip(*(c for c, _ in keys), strict=True)
    return [math.fsum(map(operator.mul, weights, column)) / total for column in latents], lse


def lse_lanes(lse: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bits of `lse` [...] as integers [..., lanes] as wide as `dtype`: low half first where it takes two."""
    if dtype in (torch.float32, torch.float64):
        return lse.clone().view(torch.int32 if dtype == torch.float32 else torch.int64).unsqueeze(-1)
    bits = lse.clone().view(torch.int32).to(torch.int64) % 2**32
    halves = torch.stack([bits % 2**16, bits // 2**16], dim=-1)
    return torch.where(halves < 2**15, halves, halves - 2**16).to(torch.int16)
