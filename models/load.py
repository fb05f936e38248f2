"""From a checkpoint to one rank's parameters, leaf after leaf as the table of weights says.

A rank reads its own heads, experts, columns and rows of the vocabulary, and
nothing of the others'.  Weights in the file's own dtype stay in the mapped
file where they are large; what is stacked, padded, converted or quantised is
read piece after piece into its place, so that loading needs little more memory
than the weights themselves.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from attrs import define, field
from tqdm import tqdm

from mla_fx.decode import QUANTIZATIONS
from mla_fx.dtypes import DTYPES, wide
from mla_fx.effects import InputError
from mla_fx.effects.aval import FLOATS
from mla_fx.layout import Layout, layout_of
from mla_fx.models.checkpoint import Checkpoint, CheckpointError
from mla_fx.models.formats import Channels, Stored
from mla_fx.models.parameters import ModelParams, MtpParams
from mla_fx.models.quantize import quantize_int8
from mla_fx.models.weights import layer_prefix, layer_weights, model_weights, mtp_weights
from mla_fx.parameters import AttentionParams, LayerParams, Quantized
from mla_fx.weights import Form, Place, Weight, shares

#: Experts' tensors that are read from a file opened once; what they take stays in memory together.
AT_ONCE = 4

Tensor = torch.Tensor
Leaf = Tensor | Quantized[Tensor]


@define(kw_only=True)
class Loader:
    """Reads one rank's part of a checkpoint in `dtype`; `ranks` says how many there are, or their `Layout`.

    `quantization` "w8a8": projections are stored in int8, and kept as they are where the checkpoint has them so.
    `progress` shows a bar over the tensors read.  Raises `InputError` for ranks that do not divide the heads.
    """

    checkpoint: Checkpoint
    rank: int
    layout: Layout = field(converter=layout_of, alias="ranks")
    dtype: torch.dtype
    replicate_query: bool = False
    project_before_merge: bool = False
    quantization: str | None = None
    progress: bool = False
    _bar: "tqdm[None] | None" = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        heads = self.checkpoint.config.attention.num_attention_heads
        if heads % self.layout.tp:
            raise InputError(f"ranks: must divide num_attention_heads, {heads}: got {self.layout.tp}")
        if not 0 <= self.rank < self.layout.size:
            raise InputError(f"rank: must be in 0..{self.layout.size - 1}: got {self.rank}")
        if self.dtype not in (kinds := [DTYPES[name] for name in FLOATS]):
            raise InputError(f"dtype: must be one of {', '.join(map(str, kinds))}: got {self.dtype}")
        if self.quantization not in (None, *QUANTIZATIONS):
            raise InputError(f"quantization: must be None or {', '.join(QUANTIZATIONS)}: got {self.quantization!r}")

    @property
    def _form(self) -> Form:
        return {"replicate_query": self.replicate_query, "project_before_merge": self.project_before_merge}

    def model(self) -> ModelParams[Tensor]:
        """All decoder layers, embedding, final norm and head."""
        weights = model_weights(self.checkpoint.config, **self._form)
        total = sum(len(self._tensors(weight)) for weight in _distinct(weights).values())
        hidden = None if self.progress else True  # None: hidden where nobody looks
        try:
            with tqdm(
                total=total, desc=f"loading rank {self.rank}", unit="tensor", disable=hidden, leave=False
            ) as self._bar:
                model: ModelParams[Tensor] = self._read(weights)
        finally:
            self._bar = None
        return model

    def mtp(self, model: ModelParams[Tensor]) -> MtpParams[Tensor]:
        """The first prediction module; embedding and head are those of `model` where the file has none of its own."""
        config, files = self.checkpoint.config, self.checkpoint.files
        layer = config.num_hidden_layers
        if not self.checkpoint.has_prediction:
            raise CheckpointError(
                f"{self.checkpoint.directory}: must have the tensors of a prediction layer, model.layers.{layer}: "
                "got none"
            )
        weights = mtp_weights(config, layer, **self._form)
        tables = ((weights.embed_tokens, model.embed_tokens), (weights.lm_head, model.lm_head))
        module: MtpParams[Tensor] = self._read(
            weights, {id(weight): shared for weight, shared in tables if weight.names[0] not in files}
        )
        return module

    def layer(self, layer: int) -> LayerParams[Tensor]:
        """One decoder layer; those of prediction modules follow the others."""
        found: LayerParams[Tensor] = self._read(self._layer(layer))
        return found

    def attention(self, layer: int) -> AttentionParams[Tensor]:
        """The attention of one layer: rows and columns of own heads."""
        found: AttentionParams[Tensor] = self._read(self._layer(layer).attention)
        return found

    def _layer(self, layer: int) -> LayerParams[Weight]:
        config = self.checkpoint.config
        if f"{layer_prefix(layer)}input_layernorm.weight" not in self.checkpoint.files:
            last = config.num_hidden_layers - 1
            raise InputError(f"layer: must be in 0..{last} or a prediction layer of the checkpoint: got {layer}")
        return layer_weights(config, layer, **self._form)

    def _read(self, weights: Any, known: Mapping[int, Leaf] | None = None) -> Any:
        """The pytree `weights` with this rank's leaf for each weight, one for each distinct one; `known` by `id`."""
        leaves = dict(known or {})
        for key, weight in _distinct(weights).items():
            if key not in leaves:
                leaves[key] = self._leaf(weight)
        return pytree.tree_map(lambda weight: leaves[id(weight)], weights)

    def _tensors(self, weight: Weight) -> list[tuple[str, list[Place]]]:
        """What a leaf takes of each tensor of the checkpoint."""
        places = weight.places(shares(self.rank, self.layout))
        return [(name, list(each)) for name, each in itertools.groupby(places, lambda place: place.name)]

    def _leaf(self, weight: Weight) -> Leaf:
        small = weight.kind == "projection" and self.quantization is not None
        dtype = wide(self.dtype) if weight.kind == "bias" else self.dtype
        shape = weight.local(shares(self.rank, self.layout))
        whole = torch.zeros(shape, dtype=torch.int8 if small else dtype)
        leaf: Leaf = Quantized(whole, torch.zeros(shape[:-1], dtype=wide(self.dtype))) if small else whole
        tensors = self._tensors(weight)
        for some in (tensors[start : start + AT_ONCE] for start in range(0, len(tensors), AT_ONCE)):
            wanted = [(name, [(place.rows, place.columns) for place in places]) for name, places in some]
            for (_, places), parts in zip(some, self.checkpoint.stored(wanted), strict=True):
                if parts[0].tensor.shape == shape and not small:
                    leaf = parts[0].read(dtype)
                else:
                    for place, stored in zip(places, parts, strict=True):
                        self._fill(leaf, weight, place, stored)
                if self._bar is not None:
                    self._bar.update()
        return leaf

    def _fill(self, leaf: Leaf, weight: Weight, place: Place, stored: Stored) -> None:
        """Piece after piece into its place, in 8 bits where the leaf is; what is int8 in the file is kept as it is."""
        into = leaf.weight if isinstance(leaf, Quantized) else leaf
        into = (into.mT if weight.transposed else into)[place.at][..., : stored.tensor.shape[-1]]
        if isinstance(leaf, Quantized) and isinstance(stored, Channels):
            into.copy_(stored.tensor)
            leaf.scale[place.at].copy_(stored.own_scale)
            return
        for part, piece in stored.pieces(self.dtype if isinstance(leaf, Quantized) else into.dtype):
            if isinstance(leaf, Quantized):
                into[part], leaf.scale[place.at][part] = quantize_int8(piece)
            else:
                into[part] = piece


def _distinct(weights: Any) -> dict[int, Weight]:
    """The weights by their `id`; embedding and head may be one."""
    return {id(weight): weight for weight in pytree.tree_leaves(weights)}
