"""Partial results in one softmax over their LSEs: npu_attention_update, for any number of features.

The operator takes a multiple of 8 up to 512 (attention_update_tiling.cpp of
ops-transformer).  More are merged in slices, since the weights of a row are the
same for all of its features, and what is no multiple of 8 is padded with zeros.
"""

from collections.abc import Iterable

import torch

_MOST, _MULTIPLE = 512, 8


def update(lse: Iterable[torch.Tensor], parts: list[torch.Tensor], kind: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`lse` P of float32 [R], `parts` P of [R, D] -> merged [R, D]; of `kind` 1 the LSE of all, [R], too."""
    operator, features, lse = torch.ops.npu.npu_attention_update, parts[0].shape[1], list(lse)
    if features % _MULTIPLE == 0 and features <= _MOST:
        merged, total = operator(lse, parts, kind)
        return merged, total
    found = []
    for start in range(0, features, _MOST):
        width = min(_MOST, features - start)
        merged, total = operator(lse, [_padded(part[:, start : start + width]) for part in parts], kind)
        found.append(merged[:, :width])
    return torch.cat(found, 1), total


def _padded(part: torch.Tensor) -> torch.Tensor:
    """With zeros behind its features, up to a number that the operator takes."""
    rows, width = part.shape
    padded = part.new_zeros((rows, -(-width // _MULTIPLE) * _MULTIPLE))
    padded[:, :width].copy_(part)
    return padded
