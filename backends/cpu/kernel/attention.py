"""Attention by the compiled kernel, for the rules of `ops.HistoryAttention` and `ops.CurrentAttention`.

Scores, softmax, accumulation and LSE are in float32, whatever the dtype.  The
cache is read where it lies, block by block; what lengths do not reach is not
read.  A row's bits depend on its request alone: not on what else is in the
batch, nor on the number of threads.  Every rank's operands lie as those of the
first do.
"""

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from mla_fx.backends.cpu import kernel
from mla_fx.backends.cpu.kernel import Tensors
from mla_fx.effects import InputError

Lengths = Sequence[Sequence[int]]  # one for each of the ranks, as `Tensors` are


def serves(q_latent: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor) -> bool:
    """Whether there is a kernel for these queries and keys: float64 is not its own, nor are features with gaps."""
    return (
        kernel.engine() is not None
        and q_latent.dtype in kernel.FORMATS
        and latent.stride(-1) == rope.stride(-1) == 1
        and q_latent.numel() > 0
    )


def history(
    q_latents: Tensors,
    q_ropes: Tensors,
    latent_caches: Tensors,
    rope_caches: Tensors,
    block_tables: Tensors,
    query_lengths: Lengths,
    history_lengths: Lengths,
    scale: float,
) -> tuple[Tensors, Tensors]:
    """Of every rank outputs [T, H, L] and LSE [T, H] in float32, as `ops.HistoryAttention` has them."""
    keys = latent_caches, rope_caches, _in_one_piece(block_tables)
    latent_block, latent_row, _ = latent_caches[0].stride()
    rope_block, rope_row, _ = rope_caches[0].stride()
    blocks, block, _ = latent_caches[0].shape
    strides = latent_block, latent_row, rope_block, rope_row, block_tables[0].shape[1], block, blocks
    return _attend(q_latents, q_ropes, keys, strides, query_lengths, history_lengths, scale)


def current(
    q_latents: Tensors, q_ropes: Tensors, latents: Tensors, k_ropes: Tensors, query_lengths: Lengths, scale: float
) -> tuple[Tensors, Tensors]:
    """Of every rank outputs [T, H, L] and LSE [T, H] in float32, as `ops.CurrentAttention` has them."""
    strides = 0, latents[0].stride(0), 0, k_ropes[0].stride(0), 0, 0, 0
    return _attend(q_latents, q_ropes, (latents, k_ropes, (0,) * len(latents)), strides, query_lengths, None, scale)


def _attend(
    q_latents: Tensors,
    q_ropes: Tensors,
    keys: Sequence[Sequence[Any]],
    strides: tuple[int, ...],
    queries: Lengths,
    cached: Lengths | None,
    scale: float,
) -> tuple[Tensors, Tensors]:
    """`keys`: latents, ropes and tables; `strides`: in latents and ropes, of a table, keys of a block, and blocks."""
    q_latents, q_ropes = _in_one_piece(q_latents), _in_one_piece(q_ropes)
    tokens, heads, features = q_latents[0].shape
    outs = kernel.room(q_latents, tokens, heads, features)
    sums = kernel.room(q_latents, tokens, heads, dtype=torch.float32)
    lengths = array("q", chain(*chain(*(zip(queries, cached, strict=True) if cached else zip(queries, strict=True)))))
    at, step = lengths.buffer_info()[0], len(lengths) // len(queries) * lengths.itemsize
    numbers = [at + rank * step for rank in range(len(queries))]
    engine, format = kernel.ENGINES[kernel.engine() or ""], kernel.FORMATS[q_latents[0].dtype]
    sizes = len(queries[0]), tokens, heads, features, q_ropes[0].shape[2]
    refused = kernel.function("mla_fx_attend", "iiiiiiiiiiiiiifi")(
        (q_latents, q_ropes, *keys, numbers, outs, sums),
        *(engine, format, *strides, *sizes, scale, torch.get_num_threads()),
    )
    if refused is not None:
        request, rank = refused
        if cached is None or queries[rank][request] < 0 or sum(queries[rank][: request + 1]) > tokens:
            raise InputError(f"query_lengths: must be of {tokens} tokens in all: got {list(queries[rank])}")
        raise outside(request, keys[2][rank][request], cached[rank][request], strides[-1])
    return outs, sums


def _in_one_piece(parts: Tensors) -> Tensors:
    """Every rank's lies as the first's does."""
    return parts if parts[0].is_contiguous() else [part.contiguous() for part in parts]


def outside(request: int, table: torch.Tensor, keys: int, blocks: int) -> InputError:
    """That the row of a block table does not say where a request's keys lie, in a cache of so many blocks."""
    return InputError(
        f"block_table[{request}]: must name blocks in 0..{blocks - 1} for each of {keys} keys: got {table.tolist()}"
    )
