"""Distributed rule of `ops.GatherHeads`."""

from typing import Any

import torch
import torch.distributed as dist


def rule(q_latent: torch.Tensor, q_rope: torch.Tensor, *, ranks: int, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """One message of L + R features a head, as bytes; then heads go beside tokens."""
    tokens, own, latent = q_latent.shape
    sent = torch.cat((q_latent, q_rope), 2)
    found = sent.new_empty((ranks, *sent.shape))
    if sent.numel():
        dist.all_gather_single(found.view(torch.uint8).flatten(0, 1), sent.view(torch.uint8), group=group)
    heads = found.transpose(0, 1)  # [T, W, N, L + R]
    q_latent_all = heads[..., :latent].reshape(tokens, ranks * own, latent)
    q_rope_all = heads[..., latent:].reshape(tokens, ranks * own, sent.shape[2] - latent)
    return q_latent_all.contiguous(), q_rope_all.contiguous()
