"""Which request a token is of, from lengths on the device."""

import torch


def owners(query_lengths: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`query_lengths` int64 [B] -> the request of each token, int64 [T], and whether it is a token of one, [T].

    A token behind all requests, which is nobody's, has any.
    """
    ends = query_lengths.cumsum(0)
    token = torch.arange(tokens, device=ends.device)
    request = torch.searchsorted(ends, token, right=True)
    return request.clamp(max=len(ends) - 1), token < ends[-1:]
