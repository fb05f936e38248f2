"""Rules of `ops.AllToAll` and `ops.Combine` that are one launch of a kernel each.

The kernels read operands where they lie, the local part too, and what a rank
was sent where it has arrived.  Beside a launch there are views and a tensor for
the result, nothing that a device would see.
"""

from typing import Final

import torch

from mla_fx.backends.common.payload import room, unpack
from mla_fx.backends.device import Run
from mla_fx.effects import Group

#: Launched at most: a device of Ascend takes no more programs than fit into 16 bits.  They take turns beyond.
PROGRAMS: Final = 65535
#: Numbers that a program has before it at a time.
BLOCK: Final = 4096
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def send(out: torch.Tensor, lse: torch.Tensor, *, run: Run, group: Group) -> torch.Tensor:
    """The payload of every rank, as `mla_fx.backends.common.payload` lays it out; bits as they were."""
    from mla_fx.backends.kernels.exchange import pack

    tokens, heads, latent = out.shape
    ranks, own = group.size, heads // group.size
    payload = room(out, ranks=ranks)
    outs, lses = unpack(payload, (tokens, own, latent))
    width, pairs = own * latent, tokens * ranks
    if pairs:
        pack[(min(pairs, PROGRAMS),)](
            _bits(out.contiguous()),
            _bits(lse.contiguous()),
            _bits(outs),
            _bits(lses),
            pairs,
            outs.stride(0),
            lses.stride(0),
            RANKS=ranks,
            OWN=own,
            WIDTH=width,
            BLOCK=min(_power(width), BLOCK),
            OWN_BLOCK=_power(own),
            TURNS=-(-pairs // PROGRAMS),
        )
    return payload


def combine(
    recv: torch.Tensor, recv_lse: torch.Tensor, local: torch.Tensor, local_lse: torch.Tensor, *, run: Run
) -> tuple[torch.Tensor]:
    """One normalisation over all parts, accumulated in float32 (float64 beside float64), rounded once."""
    from mla_fx.backends.kernels.exchange import merge

    merged = torch.empty_like(local, memory_format=torch.contiguous_format)
    rows, latent = local.shape[0] * local.shape[1], local.shape[2]
    if rows:
        recv, recv_lse = _pieces(recv), _pieces(recv_lse)
        block = _power(latent)
        at_once = max(1, min(_power(rows), BLOCK // block))
        blocks = -(-rows // at_once)
        merge[(min(blocks, PROGRAMS),)](
            recv,
            recv_lse,
            local.contiguous(),
            local_lse.contiguous(),
            merged,
            rows,
            recv.stride(0),
            recv_lse.stride(0),
            RANKS=recv.shape[0],
            LATENT=latent,
            ROWS=at_once,
            BLOCK=block,
            TURNS=-(-blocks // PROGRAMS),
        )
    return (merged,)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers, where it lies."""
    return tensor.view(_BITS[tensor.element_size()])


def _pieces(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, of whose first axis every entry is contiguous: as it lies, where it is so."""
    return tensor if tensor[:1].is_contiguous() else tensor.contiguous()


def _power(size: int) -> int:
    """The smallest power of two that is not below `size`.

    >>> [_power(size) for size in (1, 2, 3, 512, 513)]
    [1, 2, 4, 512, 1024]
    """
    return 1 << (size - 1).bit_length()
