"""From a checkpoint to one rank's parameters, tensor after tensor.

A rank reads its own heads, experts, columns and rows of the vocabulary, and
nothing of the others'.  Weights in the file's own dtype stay in the mapped
file where they are large; what is stacked, padded, converted or quantised is
read piece after piece into its place, so that loading needs little more memory
than the weights themselves.
"""

import re

import torch
from attrs import define, field
from tqdm import tqdm

from mla_fx.decode import QUANTIZATIONS
from mla_fx.dtypes import DTYPES, wide
from mla_fx.effects import InputError
from mla_fx.effects.aval import FLOATS
from mla_fx.models.checkpoint import Checkpoint, CheckpointError, Stored
from mla_fx.models.parameters import ModelParams, MtpParams, part, share
from mla_fx.models.quantize import quantize_int8
from mla_fx.models.tensors import expected
from mla_fx.parameters import (
    AttentionParams,
    LayerParams,
    MlpParams,
    MoeParams,
    Quantized,
    QueryLora,
    QueryPlain,
    heads_of,
)

Tensor = torch.Tensor
Weight = Tensor | Quantized[Tensor]
Index = int | slice | tuple[int | slice, ...]


@define(kw_only=True)
class Loader:
    """Reads one rank's part of a checkpoint in `dtype`; `quantization` "w8a8" stores projections in int8.

    `progress` shows a bar over the tensors read.  Raises `InputError` for ranks that do not divide the heads.
    """

    checkpoint: Checkpoint
    rank: int
    ranks: int
    dtype: torch.dtype
    replicate_query: bool = False
    quantization: str | None = None
    progress: bool = False
    _bar: "tqdm[None] | None" = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        heads = self.checkpoint.config.attention.num_attention_heads
        if self.ranks < 1 or heads % self.ranks:
            raise InputError(f"ranks: must divide num_attention_heads, {heads}: got {self.ranks}")
        if not 0 <= self.rank < self.ranks:
            raise InputError(f"rank: must be in 0..{self.ranks - 1}: got {self.rank}")
        if self.dtype not in (kinds := [DTYPES[name] for name in FLOATS]):
            raise InputError(f"dtype: must be one of {', '.join(map(str, kinds))}: got {self.dtype}")
        if self.quantization not in (None, *QUANTIZATIONS):
            raise InputError(f"quantization: must be None or {', '.join(QUANTIZATIONS)}: got {self.quantization!r}")

    def model(self) -> ModelParams[Tensor]:
        """All decoder layers, embedding, final norm and head."""
        config = self.checkpoint.config
        hidden = None if self.progress else True  # None: hidden where nobody looks
        try:
            with tqdm(
                total=self._count(), desc=f"loading rank {self.rank}", unit="tensor", disable=hidden, leave=False
            ) as self._bar:
                table = self._rows("model.embed_tokens.weight", config.vocab_size)
                layers = [self.layer(layer) for layer in range(config.num_hidden_layers)]
                norm = self._read("model.norm.weight")
                tied = config.tie_word_embeddings
                head = table if tied else self._rows("lm_head.weight", config.vocab_size)
        finally:
            self._bar = None
        return ModelParams(table, layers, norm, head)

    def _count(self) -> int:
        """Tensors that `model` counts: all but other ranks' experts; those that it has no part of are done at once."""
        names = expected(self.checkpoint.config)
        moe = self.checkpoint.config.moe
        own = part(moe.n_routed_experts, self.rank, self.ranks) if moe else slice(0, 0)
        experts = (re.search(r"\.experts\.(\d+)\.", name) for name in names)
        return sum(found is None or own.start <= int(found[1]) < own.stop for found in experts)

    def mtp(self, model: ModelParams[Tensor]) -> MtpParams[Tensor]:
        """The first prediction module; embedding and head are those of `model` where the file has none of its own."""
        config, files = self.checkpoint.config, self.checkpoint.files
        layer = config.num_hidden_layers
        if not self.checkpoint.has_prediction:
            raise CheckpointError(
                f"{self.checkpoint.directory}: must have the tensors of a prediction layer, model.layers.{layer}: "
                "got none"
            )
        prefix, hidden = f"model.layers.{layer}.", config.attention.hidden_size
        tables = [
            self._rows(f"{prefix}{name}.weight", config.vocab_size) if f"{prefix}{name}.weight" in files else shared
            for name, shared in (("embed_tokens", model.embed_tokens), ("shared_head.head", model.lm_head))
        ]
        halves = [
            self._rows(f"{prefix}eh_proj.weight", hidden, columns=columns)
            for columns in (slice(0, hidden), slice(hidden, 2 * hidden))
        ]
        return MtpParams(
            embed_tokens=tables[0],
            enorm=self._read(f"{prefix}enorm.weight"),
            hnorm=self._read(f"{prefix}hnorm.weight"),
            eh_proj=(halves[0], halves[1]),
            layer=self.layer(layer),
            norm=self._read(f"{prefix}shared_head.norm.weight"),
            lm_head=tables[1],
        )

    def layer(self, layer: int) -> LayerParams[Tensor]:
        """One decoder layer; those of prediction modules follow the others."""
        config, prefix = self.checkpoint.config, self._prefix(layer)
        return LayerParams(
            self._read(f"{prefix}input_layernorm.weight"),
            self.attention(layer),
            self._read(f"{prefix}post_attention_layernorm.weight"),
            self._moe(f"{prefix}mlp.")
            if config.is_moe(layer)
            else self._mlp(f"{prefix}mlp.", config.intermediate_size),
        )

    def attention(self, layer: int) -> AttentionParams[Tensor]:
        """The attention of one layer: rows and columns of own heads."""
        c, prefix = self.checkpoint.config.attention, f"{self._prefix(layer)}self_attn."
        own = heads_of(self.rank, ranks=self.ranks, heads=c.num_attention_heads)
        asked = slice(0, c.num_attention_heads) if self.replicate_query else own

        def read(name: str, rows: slice | None = None) -> Tensor:
            return self._read(f"{prefix}{name}.weight", rows)

        query_rows = slice(asked.start * c.qk_head_dim, asked.stop * c.qk_head_dim)
        query: QueryLora[Tensor] | QueryPlain[Tensor]
        if c.q_lora_rank is None:
            query = QueryPlain(self._projection(f"{prefix}q_proj.weight", query_rows))
        else:
            down = self._projection(f"{prefix}q_a_proj.weight")
            query = QueryLora(down, read("q_a_layernorm"), self._projection(f"{prefix}q_b_proj.weight", query_rows))
        width = c.qk_nope_head_dim + c.v_head_dim
        kv_b = read("kv_b_proj", slice(asked.start * width, asked.stop * width))
        kv_b = kv_b.view(asked.stop - asked.start, width, c.kv_lora_rank)
        w_uv = kv_b[own.start - asked.start : own.stop - asked.start, c.qk_nope_head_dim :]
        columns = slice(own.start * c.v_head_dim, own.stop * c.v_head_dim)
        return AttentionParams(
            query=query,
            kv_a_proj=self._projection(f"{prefix}kv_a_proj_with_mqa.weight"),
            kv_a_layernorm=read("kv_a_layernorm"),
            w_uk=kv_b[:, : c.qk_nope_head_dim].clone(memory_format=torch.contiguous_format),
            w_uv=w_uv.transpose(1, 2).clone(memory_format=torch.contiguous_format),
            o_proj=self._projection(f"{prefix}o_proj.weight", None, columns),
        )

    def _prefix(self, layer: int) -> str:
        prefix = f"model.layers.{layer}."
        if f"{prefix}input_layernorm.weight" not in self.checkpoint.files:
            last = self.checkpoint.config.num_hidden_layers - 1
            raise InputError(f"layer: must be in 0..{last} or a prediction layer of the checkpoint: got {layer}")
        return prefix

    def _mlp(self, prefix: str, width: int) -> MlpParams[Tensor]:
        """This rank's columns of a network, padded with zeros to an equal share."""
        own, columns = part(width, self.rank, self.ranks), share(width, self.ranks)
        hidden, count = self.checkpoint.config.attention.hidden_size, own.stop - own.start
        gate_up, down = self._zeros(2 * columns, hidden), self._zeros(hidden, columns)
        if count:
            self._store(gate_up, slice(0, count), f"{prefix}gate_proj.weight", own)
            self._store(gate_up, slice(columns, columns + count), f"{prefix}up_proj.weight", own)
            self._store(down, slice(None), f"{prefix}down_proj.weight", None, own)
        else:
            self._done(3)
        return MlpParams(gate_up, down)

    def _moe(self, prefix: str) -> MoeParams[Tensor]:
        """This rank's experts, stacked; those that pad its share are zero and never chosen."""
        moe, hidden = self.checkpoint.config.moe, self.checkpoint.config.attention.hidden_size
        assert moe is not None
        own, count = part(moe.n_routed_experts, self.rank, self.ranks), share(moe.n_routed_experts, self.ranks)
        width, bias = moe.moe_intermediate_size, f"{prefix}gate.e_score_correction_bias"
        kind = wide(self.dtype)
        gate_up, down = self._zeros(count, 2 * width, hidden), self._zeros(count, hidden, width)
        for y, expert in enumerate(range(own.start, own.stop)):
            self._store(gate_up, (y, slice(0, width)), f"{prefix}experts.{expert}.gate_proj.weight")
            self._store(gate_up, (y, slice(width, 2 * width)), f"{prefix}experts.{expert}.up_proj.weight")
            self._store(down, y, f"{prefix}experts.{expert}.down_proj.weight")
        return MoeParams(
            gate=self._read(f"{prefix}gate.weight"),
            e_score_correction_bias=(
                self._read(bias, dtype=kind)
                if bias in self.checkpoint.files
                else torch.zeros(moe.n_routed_experts, dtype=kind)
            ),
            gate_up_proj=gate_up,
            down_proj=down,
            shared_experts=self._mlp(f"{prefix}shared_experts.", width * moe.n_shared_experts)
            if moe.n_shared_experts
            else (),
        )

    def _zeros(self, *shape: int) -> Weight:
        """A projection [..., F, D] of zeros as the model stores it."""
        if self.quantization is None:
            return torch.zeros(shape, dtype=self.dtype)
        kind = wide(self.dtype)
        return Quantized(torch.zeros(shape, dtype=torch.int8), torch.zeros(shape[:-1], dtype=kind))

    def _store(
        self, into: Weight, at: Index, name: str, rows: slice | None = None, columns: slice | None = None
    ) -> None:
        """Read a tensor or a part of it into the first columns of `into[at]`."""
        self._done()
        self._fill(into, at, self.checkpoint.stored(name, rows=rows, columns=columns))

    def _fill(self, into: Weight, at: Index, stored: Stored) -> None:
        """Piece after piece, in 8 bits where `into` is."""
        weight = (into.weight if isinstance(into, Quantized) else into)[at][:, : stored.tensor.shape[1]]
        for part_of, piece in stored.pieces(self.dtype):
            if isinstance(into, Quantized):
                weight[part_of], into.scale[at][part_of] = quantize_int8(piece)
            else:
                weight[part_of] = piece

    def _projection(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Weight:
        """A projection or a part of it as the model stores it."""
        if self.quantization is None:
            return self._read(name, rows, columns)
        self._done()
        stored = self.checkpoint.stored(name, rows=rows, columns=columns)
        weight = self._zeros(*stored.tensor.shape)
        self._fill(weight, slice(None), stored)
        return weight

    def _rows(self, name: str, total: int, columns: slice | None = None) -> Tensor:
        """This rank's rows of a table, padded with zeros to an equal share."""
        own, count = part(total, self.rank, self.ranks), share(total, self.ranks)
        if own.stop - own.start == count:
            return self._read(name, own, columns)
        width = (columns.stop - columns.start) if columns else self.checkpoint.config.attention.hidden_size
        rows = torch.zeros(count, width, dtype=self.dtype)
        if own.stop > own.start:
            self._store(rows, slice(0, own.stop - own.start), name, own, columns)
        else:
            self._done()
        return rows

    def _read(
        self, name: str, rows: slice | None = None, columns: slice | None = None, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        self._done()
        return self.checkpoint.read(name, dtype=dtype or self.dtype, rows=rows, columns=columns)

    def _done(self, tensors: int = 1) -> None:
        if self._bar is not None:
            self._bar.update(tensors)
