"""What is right, from the definition: dense attention over the sequence nobody has cut, in float64.

Nothing here uses the code under test.
"""

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
