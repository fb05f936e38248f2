"""The arguments of fused infer attention score (FIA), by name, and what its layouts mean.

A layout names the axes of the query and, where the output has others, those of the output: BNSD_NBSD.  Batched layouts
have B requests of S places for queries; in TND requests follow each other.  LSEs are [B, N, S, 1], or [T, N, 1].
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

#: Arguments of aclnnFusedInferAttentionScoreV3 with their words, in order (op-plugin's call of the first version).
V3: Final[Mapping[str, str]] = MappingProxyType(
    {
        "query": "T",
        "key": "L",
        "value": "L",
        "pse_shift": "T",
        "atten_mask": "T",
        "actual_seq_lengths": "I",
        "actual_seq_lengths_kv": "I",
        "dequant_scale1": "T",
        "quant_scale1": "T",
        "dequant_scale2": "T",
        "quant_scale2": "T",
        "quant_offset2": "T",
        "antiquant_scale": "T",
        "antiquant_offset": "T",
        "block_table": "T",
        "query_padding_size": "T",
        "kv_padding_size": "T",
        "key_antiquant_scale": "T",
        "key_antiquant_offset": "T",
        "value_antiquant_scale": "T",
        "value_antiquant_offset": "T",
        "key_shared_prefix": "T",
        "value_shared_prefix": "T",
        "actual_shared_prefix_len": "I",
        "query_rope": "T",
        "key_rope": "T",
        "key_rope_antiquant_scale": "T",
        "num_heads": "i64",
        "scale": "d",
        "pre_tokens": "i64",
        "next_tokens": "i64",
        "input_layout": "s",
        "num_key_value_heads": "i64",
        "sparse_mode": "i64",
        "inner_precise": "i64",
        "block_size": "i64",
        "antiquant_mode": "i64",
        "softmax_lse_flag": "b",
        "key_antiquant_mode": "i64",
        "value_antiquant_mode": "i64",
        "out": "O",
        "softmax_lse": "O",
    }
)
#: What the second version, aclnnFusedInferAttentionScoreV4, calls them in Python.
RENAMED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "actual_seq_lengths": "actual_seq_qlen",
        "actual_seq_lengths_kv": "actual_seq_kvlen",
        "quant_scale2": "quant_scale_out",
        "quant_offset2": "quant_offset_out",
        "key_antiquant_scale": "dequant_scale_key",
        "key_antiquant_offset": "dequant_offset_key",
        "value_antiquant_scale": "dequant_scale_value",
        "value_antiquant_offset": "dequant_offset_value",
        "key_rope_antiquant_scale": "dequant_scale_key_rope",
        "num_heads": "num_query_heads",
        "scale": "softmax_scale",
        "softmax_lse_flag": "return_softmax_lse",
        "key_antiquant_mode": "key_quant_mode",
        "value_antiquant_mode": "value_quant_mode",
    }
)


def _fourth() -> dict[str, str]:
    """Two tensors more behind the ropes, and one mode more in front of the results."""
    found: dict[str, str] = {}
    for name, word in V3.items():
        if name == "num_heads":
            found |= {"dequant_scale_query": "T", "learnable_sink": "T"}
        if name == "out":
            found["query_quant_mode"] = "i64"
        found[name] = word
    return found


#: Arguments of aclnnFusedInferAttentionScoreV4, by the names of V3 where there is one.
V4: Final[Mapping[str, str]] = MappingProxyType(_fourth())
#: Tensors that the latent decode does without.
ABSENT: Final = tuple(
    name
    for name, word in V4.items()
    if word == "T" and name not in ("query", "atten_mask", "block_table", "query_rope", "key_rope")
)
LAYOUTS: Final = ("BSH", "BSND", "BNSD", "TND", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD", "TND_NTD")
#: From the axes of a layout to [B, S, N, D], or [T, N, D]; and the way back.
_TO_ROWS: Final = {"BSND": (0, 1, 2, 3), "BNSD": (0, 2, 1, 3), "NBSD": (1, 2, 0, 3), "TND": (0, 1, 2), "NTD": (1, 0, 2)}


class Fia:
    """The arguments by name."""

    def __init__(self, names: Mapping[str, str], arguments: tuple[Any, ...]) -> None:
        self.given = dict.fromkeys(ABSENT) | dict(zip(names, arguments, strict=True))

    def __getattr__(self, name: str) -> Any:
        return self.given[name]

    @property
    def packed(self) -> bool:
        """Whether requests follow each other."""
        return bool(self.input_layout.startswith("TND"))

    @property
    def prompt(self) -> bool:
        """Whether keys and values are of every head, D = 128, as a prompt's are."""
        return bool(self.query.shape[-1] == 128 and self.layout != "BSH")

    @property
    def layout(self) -> str:
        """Axes of the query."""
        return str(self.input_layout.split("_")[0])

    @property
    def out_layout(self) -> str:
        """Axes of the output."""
        return str(self.input_layout.split("_")[-1])

    def rows(self, tensor: torch.Tensor, layout: str, heads: int) -> torch.Tensor:
        """A view [B, S, N, D], or [T, N, D]."""
        if layout == "BSH":
            return tensor.view(*tensor.shape[:2], heads, -1)
        return tensor.permute(_TO_ROWS[layout])

    def lse_shape(self) -> list[int]:
        """Of the LSE, whatever the output's layout."""
        shape = self.rows(self.query, self.layout, self.num_heads).shape
        return [*shape[:2], 1] if self.packed else [shape[0], shape[2], shape[1], 1]

    def out_shape(self) -> list[int]:
        """Of the output, that of the query but for the order of axes."""
        shape = self.rows(self.query, self.layout, self.num_heads).shape
        if self.out_layout == "BSH":
            return list(self.query.shape)
        order = _TO_ROWS[self.out_layout]
        return [shape[order.index(axis)] for axis in range(len(order))]

    def requests(self) -> int:
        """How many."""
        return len(self.actual_seq_lengths) if self.packed else int(self.query.shape[0])

    def query_spans(self) -> list[tuple[int, int]]:
        """Where the queries of each request lie: in T, or in its own S places; with S = 1 lengths are not looked at."""
        if self.packed:
            ends = self.actual_seq_lengths
            return list(zip([0, *ends[:-1]], ends, strict=True))
        places = self.rows(self.query, self.layout, self.num_heads).shape[1]
        given = self.actual_seq_lengths
        if not given or places == 1:
            return [(0, places)] * self.requests()
        return [(0, length) for length in self.each(given)]

    def key_spans(self) -> list[tuple[int, int]]:
        """Where the keys of each request lie: cumulative only without paging in TND."""
        given = self.actual_seq_lengths_kv
        if self.packed and self.block_table is None:
            return list(zip([0, *given[:-1]], given, strict=True))
        if not given:
            places = self.rows(self.key[0], self.layout, 1).shape[1]
            return [(0, places)] * self.requests()
        return [(0, length) for length in self.each(given)]

    def each(self, lengths: list[int]) -> list[int]:
        """One length for each request, where one may be given for all."""
        count = self.requests()
        return lengths * count if len(lengths) == 1 else lengths[:count]
