"""From a checkpoint to one rank's parameters, tensor after tensor.

A rank reads its own heads, experts, columns and rows of the vocabulary, and
nothing of the others'.  Weights in the file's own dtype stay in the mapped
file; what is stacked, padded, converted or quantised is made one tensor at a
time, so that loading needs little more memory than the weights themselves.
"""

import re
from collections.abc import Callable

import torch
from attrs import define, field
from tqdm import tqdm

from mla_fx.decode import QUANTIZATIONS
from mla_fx.effects import InputError
from mla_fx.models.checkpoint import Checkpoint, CheckpointError
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
        if not self.dtype.is_floating_point:
            raise InputError(f"dtype: must be floating: got {self.dtype}")
        if self.quantization not in (None, *QUANTIZATIONS):
            raise InputError(f"quantization: must be None or {', '.join(QUANTIZATIONS)}: got {self.quantization!r}")

    def model(self) -> ModelParams[Tensor]:
        """All decoder layers, embedding, final norm and head."""
        config = self.checkpoint.config
        hidden = None if self.progress else True  # None: hidden where nobody looks
        with tqdm(
            total=self._count(), desc=f"loading rank {self.rank}", unit="tensor", disable=hidden, leave=False
        ) as self._bar:
            table = self._rows("model.embed_tokens.weight", config.vocab_size)
            layers = [self.layer(layer) for layer in range(config.num_hidden_layers)]
            norm = self._read("model.norm.weight")
            tied = config.tie_word_embeddings
            head = table if tied else self._rows("lm_head.weight", config.vocab_size)
        self._bar = None
        return ModelParams(table, layers, norm, head)

    def _count(self) -> int:
        """Tensors that `model` reads: all but other ranks' experts."""
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
        """One decoder layer."""
        config, prefix = self.checkpoint.config, f"model.layers.{layer}."
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
        c, prefix = self.checkpoint.config.attention, f"model.layers.{layer}.self_attn."
        own = heads_of(self.rank, ranks=self.ranks, heads=c.num_attention_heads)
        asked = slice(0, c.num_attention_heads) if self.replicate_query else own

        def read(name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
            return self._read(f"{prefix}{name}.weight", rows, columns)

        query_rows = slice(asked.start * c.qk_head_dim, asked.stop * c.qk_head_dim)
        query: QueryLora[Tensor] | QueryPlain[Tensor]
        if c.q_lora_rank is None:
            query = QueryPlain(self._weight(read("q_proj", query_rows)))
        else:
            down, up = self._weight(read("q_a_proj")), self._weight(read("q_b_proj", query_rows))
            query = QueryLora(down, read("q_a_layernorm"), up)
        width = c.qk_nope_head_dim + c.v_head_dim
        kv_b = read("kv_b_proj", slice(asked.start * width, asked.stop * width))
        kv_b = kv_b.view(asked.stop - asked.start, width, c.kv_lora_rank)
        w_uv = kv_b[own.start - asked.start : own.stop - asked.start, c.qk_nope_head_dim :]
        columns = slice(own.start * c.v_head_dim, own.stop * c.v_head_dim)
        return AttentionParams(
            query=query,
            kv_a_proj=self._weight(read("kv_a_proj_with_mqa")),
            kv_a_layernorm=read("kv_a_layernorm"),
            w_uk=kv_b[:, : c.qk_nope_head_dim].contiguous(),
            w_uv=w_uv.transpose(1, 2).contiguous(),
            o_proj=self._weight(read("o_proj", None, columns)),
        )

    def _mlp(self, prefix: str, width: int) -> MlpParams[Tensor]:
        """This rank's columns of a network, padded with zeros to an equal share."""
        own, columns = part(width, self.rank, self.ranks), share(width, self.ranks)
        hidden, count = self.checkpoint.config.attention.hidden_size, own.stop - own.start
        gate_up = torch.zeros(2 * columns, hidden, dtype=self.dtype)
        down = torch.zeros(hidden, columns, dtype=self.dtype)
        if count:
            gate_up[:count] = self._read(f"{prefix}gate_proj.weight", own)
            gate_up[columns : columns + count] = self._read(f"{prefix}up_proj.weight", own)
            down[:, :count] = self._read(f"{prefix}down_proj.weight", None, own)
        return MlpParams(self._weight(gate_up), self._weight(down))

    def _moe(self, prefix: str) -> MoeParams[Tensor]:
        """This rank's experts, stacked; those that pad its share are zero and never chosen."""
        moe, hidden = self.checkpoint.config.moe, self.checkpoint.config.attention.hidden_size
        assert moe is not None
        own, count = part(moe.n_routed_experts, self.rank, self.ranks), share(moe.n_routed_experts, self.ranks)
        width, bias = moe.moe_intermediate_size, f"{prefix}gate.e_score_correction_bias"
        wide = torch.promote_types(self.dtype, torch.float32)

        def gate_up(expert: int) -> Tensor:
            names = (f"{prefix}experts.{expert}.{name}_proj.weight" for name in ("gate", "up"))
            return torch.cat([self._read(name) for name in names])

        def down(expert: int) -> Tensor:
            return self._read(f"{prefix}experts.{expert}.down_proj.weight")

        return MoeParams(
            gate=self._read(f"{prefix}gate.weight"),
            e_score_correction_bias=(
                self._read(bias, dtype=wide)
                if bias in self.checkpoint.files
                else torch.zeros(moe.n_routed_experts, dtype=wide)
            ),
            gate_up_proj=self._stack(gate_up, own, (count, 2 * width, hidden)),
            down_proj=self._stack(down, own, (count, hidden, width)),
            shared_experts=self._mlp(f"{prefix}shared_experts.", width * moe.n_shared_experts)
            if moe.n_shared_experts
            else (),
        )

    def _stack(self, read: Callable[[int], Tensor], own: slice, shape: tuple[int, int, int]) -> Weight:
        """Experts one after the other into one tensor [Y, F, D], in 8 bits as they come where that is asked for."""
        if self.quantization is None:
            stacked = torch.zeros(shape, dtype=self.dtype)
            for y, expert in enumerate(range(own.start, own.stop)):
                stacked[y] = read(expert)
            return stacked
        wide = torch.promote_types(self.dtype, torch.float32)
        small = Quantized(torch.zeros(shape, dtype=torch.int8), torch.zeros(shape[:2], dtype=wide))
        for y, expert in enumerate(range(own.start, own.stop)):
            one = quantize_int8(read(expert))
            small.weight[y], small.scale[y] = one.weight, one.scale
        return small

    def _weight(self, weight: Tensor) -> Weight:
        """A projection as the model stores it."""
        if self.quantization is None:
            return weight
        small = quantize_int8(weight)
        return small._replace(scale=small.scale.to(torch.promote_types(self.dtype, torch.float32)))

    def _rows(self, name: str, total: int, columns: slice | None = None) -> Tensor:
        """This rank's rows of a table, padded with zeros to an equal share."""
        own, count = part(total, self.rank, self.ranks), share(total, self.ranks)
        if own.stop - own.start == count:
            return self._read(name, own, columns)
        width = (columns.stop - columns.start) if columns else self.checkpoint.config.attention.hidden_size
        rows = torch.zeros(count, width, dtype=self.dtype)
        if own.stop > own.start:
            rows[: own.stop - own.start] = self._read(name, own, columns)
        return rows

    def _read(
        self, name: str, rows: slice | None = None, columns: slice | None = None, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        if self._bar is not None:
            self._bar.update()
        return self.checkpoint.read(name, dtype=dtype or self.dtype, rows=rows, columns=columns)
