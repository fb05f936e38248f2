"""Attention of the new queries over this rank's shard of the history.

For token t of request b, with the keys j < history_lengths[b] of the shard,
row j at block_table[b, j // S], j % S:

    s[j]        = scale * (q_latent[t, h] . c[j] + q_rope[t, h] . k_rope[j])
    lse[t, h]   = log sum_j exp s[j]                      natural log
    hist[t, h]  = sum_j exp(s[j] - lse[t, h]) * c[j]

No mask: all history precedes all new tokens.  A token whose request has no
history on this rank, and a padding token (t >= sum query_lengths), gets output
0 and LSE -inf, or +inf where that is what an operator writes: a merge takes
either for no key.  Keys and values are the same latent.  Source: MLA decode
(DeepSeek-V2 paper); the history part of the vLLM-Ascend split.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from attrs import field, frozen

from mla_fx.effects.aval import Aval, wide_dtype
from mla_fx.effects.op import Op
from mla_fx.effects.validate import InputError, number, within, word

#: Scratch that both attention operators use unless told another; on an NPU one preallocated block serves both.
WORKSPACE = "workspace"


def check_query_lengths(lengths: tuple[int, ...], tokens: int) -> None:
    """Lengths are at least 0 and their sum fits the tokens of the step; raises `InputError`."""
    if min(lengths, default=0) < 0:
        raise InputError(f"query_lengths: each must be at least 0: got {lengths}")
    if sum(lengths) > tokens:
        raise InputError(
            f"query_lengths: the sum must be at most T = {tokens} tokens: got {sum(lengths)}, from {lengths}"
        )


@frozen
class HistoryAttention(Op):
    """Queries of all H heads over the paged shard.

    `q_latent` [T, H, L], `q_rope` [T, H, R], `latent_cache` [C, S, L], `rope_cache` [C, S, R],
    `block_table` int32 [B, M], `query_lengths` host [B], `history_lengths` host [B] (this rank's)
    -> `hist` [T, H, L] in the query dtype, `hist_lse` [T, H] float32 (float64 beside float64).
    """

    scale: float = field(validator=number(above=0))
    workspace: str = field(default=WORKSPACE, validator=word)
    operands: ClassVar = {
        "q_latent": "T H L",
        "q_rope": "T H R",
        "latent_cache": "C S L",
        "rope_cache": "C S R",
        "block_table": "B M int32",
        "query_lengths": "B host",
        "history_lengths": "B host",
    }
    results: ClassVar = ("hist", "hist_lse")

    @property
    def uses(self) -> tuple[str, ...]:
        """Its workspace, by name."""
        return (self.workspace,)

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """Query and cache have one dtype."""
        shape = (axes["T"], axes["H"])
        return Aval((*shape, axes["L"]), dtype), Aval(shape, wide_dtype(dtype))

    def work(self, axes: Mapping[str, int], lengths: Mapping[str, Sequence[int]]) -> int:
        """Score and value of every new token with every key of the shard."""
        pairs = sum(n * m for n, m in zip(lengths["query_lengths"], lengths["history_lengths"], strict=True))
        return pairs * axes["H"] * (2 * axes["L"] + axes["R"])

    def value_rule(self, avals: Mapping[str, Aval], values: Mapping[str, Any]) -> None:
        """Lengths fit tokens and table; every block that a length reaches is a block of the cache."""
        check_query_lengths(values["query_lengths"], avals["q_latent"].shape[0])
        blocks, size, _ = avals["latent_cache"].shape
        table, columns = values["block_table"], avals["block_table"].shape[1]
        lengths: tuple[int, ...] = values["history_lengths"]
        longest = max(lengths, default=0)
        if longest > columns * size or min(lengths, default=0) < 0:
            raise InputError(
                f"history_lengths: each must be in 0..{columns * size} ({columns} columns of block_table, {size} a "
                f"block): got {lengths}"
            )
        if not within(table[:, : -(-longest // size)], 0, blocks):
            self._refuse_blocks(table, lengths, blocks, size)

    def _refuse_blocks(self, table: Any, lengths: tuple[int, ...], blocks: int, size: int) -> None:
        """Find a wrong block that a length really reaches; entries behind may be anything."""
        for request, length in enumerate(lengths):
            for column, block in enumerate(table[request, : -(-length // size)].tolist()):
                if not 0 <= block < blocks:
                    raise InputError(
                        f"block_table[{request}, {column}]: must be in 0..{blocks - 1}, since "
                        f"history_lengths[{request}] is {length}: got {block}"
                    )
