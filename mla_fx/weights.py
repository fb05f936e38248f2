"""The one table of a layer's weights: names and shapes in a checkpoint, and the part of them that a rank has.

`attention_weights`, `mlp_weights` and `moe_weights` are the parameters' own pytrees with a `Weight` for each leaf.
Shapes of a step's inputs (`avals`), names in a checkpoint (`named`), seeded weights (`seeded`), and a rank's part of
tensors at hand (`shard_attention`) or in files (`mla_fx.models.load`) are all read from them; `mla_fx.models.weights`
has the rest of a model.  Names and shapes are those of Hugging Face: the weight of a projection is [out, in], every
expert has tensors of its own.

`kv_b_proj` [H * (P + V), L] holds, per head, P rows that expand the latent to keys and V rows that expand it to values:

    w_uk[n, p, l] = kv_b_proj[n * (P + V) + p, l]
    w_uv[n, l, v] = kv_b_proj[n * (P + V) + P + v, l]

so that q_nope . (w_uk c) = (q_nope w_uk) . c, and sum_j p_j (w_uv^T c_j) = w_uv^T sum_j p_j c_j.

Where ranks do not divide a number, shares are rounded up and the last ones are padded with zeros, which add nothing: an
expert that is never chosen, a column of zeros, a row of the vocabulary that no token names.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypedDict, Unpack

import torch
import torch.utils._pytree as pytree
from attrs import evolve, frozen

from mla_fx.config import MlaConfig, MoeConfig
from mla_fx.effects import Aval, Group, InputError
from mla_fx.effects.aval import wide_dtype
from mla_fx.layout import Layout, layout_of
from mla_fx.parameters import AttentionParams, MlpParams, MoeParams, Quantized, QueryLora, QueryPlain

#: Who shares something out: the ranks of "tp" heads, columns and rows of the vocabulary, those of "ep" experts; what
#: every rank has for the heads of its whole context group, the context groups of a replica share out ("contexts").
By = Literal["tp", "contexts", "ep"]
#: What a weight is: "projection" and "absorbed" are 8-bit in a checkpoint that is; "projection" also in a step that is.
#: A "bias" is float32 beside every dtype (float64 beside float64).
Kind = Literal["projection", "absorbed", "matrix", "embedding", "norm", "bias"]


class Form(TypedDict, total=False):
    """What of an attention a rank has for all heads of its context group, by the pass that wants it so.

    See `mla_fx.passes`.
    """

    replicate_query: bool
    project_before_merge: bool


@frozen
class Share:
    """The part that a rank of a group has; a shape asks for the size only, any rank's is the same."""

    rank: int
    group: Group

    def count(self, total: int) -> int:
        """How many of `total` a rank holds, padding included."""
        return self.group.share(total)

    def part(self, total: int) -> slice:
        """Those of `total` that the rank really holds, none for the last ranks where there are few."""
        return self.group.part(total, self.rank)


Shares = Mapping[By, Share]


def shares(rank: int, ranks: int | Layout) -> Shares:
    """What `rank` has in a layout, or among so many ranks that share out everything."""
    layout = layout_of(ranks)
    found: dict[By, Share] = {name: Share(layout.index(name, rank), layout.group(name)) for name in ("tp", "ep")}
    context = layout.index("tp", rank) // layout.dcp
    return {**found, "contexts": Share(context, Group("contexts", layout.tp // layout.dcp))}


@frozen
class Cut:
    """How ranks share a tensor out: `units` equal parts of its rows, of its columns, or an expert each.

    The ranks of `group` have a share of the units each.  `exact` names the field of the
    configuration that must be a multiple of the ranks; without it shares are padded.
    """

    along: Literal["rows", "columns", "experts"]
    units: int
    group: By = "tp"
    exact: str | None = None

    def share(self, of: Shares) -> Share:
        """The rank's share of the units; raises `InputError` where it must be exact and is not."""
        share = of[self.group]
        if self.exact and self.units % share.group.size:
            raise InputError(f"{self.exact}: must be a multiple of the ranks, {share.group.size}: got {self.units}")
        return share


@frozen
class Place:
    """A part of a tensor of the checkpoint, None for all of it, and where in the leaf it goes.

    The leaf (transposed, where its weight says so) at `at` takes it in its first columns.
    """

    name: str
    at: tuple[int | slice, ...] = ()
    rows: slice | None = None
    columns: slice | None = None


@frozen(kw_only=True)
class Weight:
    """A leaf of the parameters.  Without names it is zeros, which no checkpoint has.

    `names` in the checkpoint, of several tensors one under the other, "{}" the number of an expert; `shape` of each.
    Of each unit of rows, `unit_rows` makes an entry of the leaf of its own, [units, rows, columns]; of all columns
    `columns` are taken.  `transposed` exchanges the leaf's last two axes.  What is `optional` may be missing.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    kind: Kind = "projection"
    cut: Cut | None = None
    unit_rows: slice | None = None
    columns: slice | None = None
    transposed: bool = False
    optional: bool = False

    def local(self, of: Shares) -> tuple[int, ...]:
        """Shape of a rank's leaf."""
        *rest, last = self.shape
        if self.columns:
            last = self.columns.stop - self.columns.start
        own = self.cut.share(of).count(self.cut.units) if self.cut else 0
        leading: tuple[int, ...] = ()
        if self.cut and self.cut.along == "columns":
            last = last // self.cut.units * own
        elif self.cut and self.cut.along == "experts":
            leading = (own,)
        elif self.cut and self.unit_rows:
            leading, rest = (own,), [self.unit_rows.stop - self.unit_rows.start]
        elif self.cut:
            rest = [rest[0] // self.cut.units * own]
        if len(self.names) > 1:
            rest = [rest[0] * len(self.names)]
        return (*leading, last, *rest) if self.transposed else (*leading, *rest, last)

    def places(self, of: Shares) -> Iterator[Place]:
        """What a rank has of the checkpoint; where padding is all, nothing."""
        if self.cut is None:
            yield from (Place(name) for name in self.names)
            return
        share, along = self.cut.share(of), self.cut.along
        own = share.part(self.cut.units)
        if own.start == own.stop:
            return
        unit = self.shape[1 if along == "columns" else 0] // self.cut.units
        taken = slice(own.start * unit, own.stop * unit)
        # Rows that each of the tensors one under the other has in the leaf, padding included.
        height = share.count(self.cut.units) * unit if along == "rows" else self.shape[0]
        for k, name in enumerate(self.names):
            if along == "experts":
                rows = slice(k * height, (k + 1) * height)
                yield from (Place(name.format(x), (x - own.start, rows)) for x in range(own.start, own.stop))
            elif along == "columns":
                yield Place(name, (slice(k * height, (k + 1) * height),), None, taken)
            elif self.unit_rows:
                first, last = self.unit_rows.start, self.unit_rows.stop
                for i, u in enumerate(range(own.start, own.stop)):
                    yield Place(name, (i,), slice(u * unit + first, u * unit + last))
            else:
                at = slice(k * height, k * height + taken.stop - taken.start)
                yield Place(name, (at,), taken, self.columns)

    def each_name(self) -> Iterator[str]:
        """Every tensor of the checkpoint that the ranks together read."""
        experts = self.cut.units if self.cut and self.cut.along == "experts" else 1
        for name in self.names:
            yield from (name.format(x) for x in range(experts))


# --- the table -----------------------------------------------------------------------------------


def attention_weights(config: MlaConfig, prefix: str = "", **form: Unpack[Form]) -> AttentionParams[Weight]:
    """The attention of a layer; with `replicate_query` every rank projects the queries of all heads of its context
    group, with `project_before_merge` their values.
    """
    c, heads = config, config.num_attention_heads
    own = Cut("rows", heads, exact="num_attention_heads")
    everyone = Cut("rows", heads, "contexts")
    asked, merged = (everyone if form.get(name) else own for name in ("replicate_query", "project_before_merge"))

    def weight(name: str, *shape: int, **how: Any) -> Weight:
        return Weight(names=(f"{prefix}{name}.weight",), shape=shape, **how)

    def expand(cut: Cut, rows: slice, **how: Any) -> Weight:
        shape = (heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
        return weight("kv_b_proj", *shape, kind="absorbed", cut=cut, unit_rows=rows, **how)

    query: QueryLora[Weight] | QueryPlain[Weight]
    if c.q_lora_rank is None:
        query = QueryPlain(weight("q_proj", heads * c.qk_head_dim, c.hidden_size, cut=asked))
    else:
        query = QueryLora(
            weight("q_a_proj", c.q_lora_rank, c.hidden_size),
            weight("q_a_layernorm", c.q_lora_rank, kind="norm"),
            weight("q_b_proj", heads * c.qk_head_dim, c.q_lora_rank, cut=asked),
        )
    keys, values = slice(0, c.qk_nope_head_dim), slice(c.qk_nope_head_dim, c.qk_nope_head_dim + c.v_head_dim)
    return AttentionParams(
        query=query,
        kv_a_proj=weight("kv_a_proj_with_mqa", c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size),
        kv_a_layernorm=weight("kv_a_layernorm", c.kv_lora_rank, kind="norm"),
        w_uk=expand(asked, keys),
        w_uv=expand(merged, values, transposed=True),
        o_proj=weight("o_proj", c.hidden_size, heads * c.v_head_dim, cut=evolve(own, along="columns")),
    )


def mlp_weights(hidden: int, width: int, prefix: str = "", *, experts: int | None = None) -> MlpParams[Weight]:
    """A feed-forward network of `width`, shared out by columns; or one for each of `experts`, whole on its rank."""
    within = f"{prefix}{{}}." if experts else prefix

    def weight(names: tuple[str, ...], rows: int, columns: int, along: Literal["rows", "columns"]) -> Weight:
        cut = Cut("experts", experts, "ep") if experts else Cut(along, width)
        return Weight(names=tuple(f"{within}{name}.weight" for name in names), shape=(rows, columns), cut=cut)

    return MlpParams(
        gate_up_proj=weight(("gate_proj", "up_proj"), width, hidden, "rows"),
        down_proj=weight(("down_proj",), hidden, width, "columns"),
    )


def moe_weights(config: MoeConfig, hidden: int, prefix: str = "") -> MoeParams[Weight]:
    """Routed experts, the gate on all ranks, and shared experts as one network."""
    count, width, shared = config.n_routed_experts, config.moe_intermediate_size, config.n_shared_experts
    # Only the gate without an auxiliary loss has a correction; elsewhere it is zero.
    bias = (f"{prefix}gate.e_score_correction_bias",) if config.topk_method == "noaux_tc" else ()
    experts = mlp_weights(hidden, width, f"{prefix}experts.", experts=count)
    return MoeParams(
        gate=Weight(names=(f"{prefix}gate.weight",), shape=(count, hidden), kind="matrix"),
        e_score_correction_bias=Weight(names=bias, shape=(count,), kind="bias"),
        gate_up_proj=experts.gate_up_proj,
        down_proj=experts.down_proj,
        shared_experts=mlp_weights(hidden, width * shared, f"{prefix}shared_experts.") if shared else (),
    )


# --- what is read from it ------------------------------------------------------------------------


def avals(weights: Any, of: Shares, *, dtype: str, quantization: str | None = None) -> Any:
    """The pytree `weights` with the shape of a rank's leaf for each weight; in 8 bits a projection's are two."""

    def aval(weight: Weight) -> Aval | Quantized[Aval]:
        shape = weight.local(of)
        if weight.kind == "projection" and quantization:
            return Quantized(Aval(shape, "int8"), Aval(shape[:-1], wide_dtype(dtype)))
        return Aval(shape, wide_dtype(dtype) if weight.kind == "bias" else dtype)

    return pytree.tree_map(aval, weights)


def named(weights: Any) -> dict[str, Weight]:
    """Every tensor of a checkpoint that belongs to the leaves of `weights`, and a leaf that it belongs to."""
    return {name: weight for weight in pytree.tree_leaves(weights) for name in weight.each_name()}


def seeded(weight: Weight, generator: torch.Generator) -> torch.Tensor:
    """A tensor of a checkpoint, float32: outputs of variance about 1 for inputs that have it; norms near 1."""
    noise = torch.randn(weight.shape, generator=generator)
    if weight.kind == "embedding":
        return noise
    if weight.kind in ("norm", "bias"):
        return 0.1 * noise + (weight.kind == "norm")
    return noise / math.sqrt(weight.shape[-1])


def random_attention(
    config: MlaConfig, *, generator: torch.Generator, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Seeded weights of a layer's attention, all heads, by their names behind `self_attn.`: `q_a_proj.weight`, ..."""
    return {name: seeded(each, generator).to(dtype) for name, each in named(attention_weights(config)).items()}


def shard_attention(
    full: Mapping[str, torch.Tensor], config: MlaConfig, *, rank: int, ranks: int | Layout, **form: Unpack[Form]
) -> AttentionParams[torch.Tensor]:
    """One rank's parameters, copied from the weights of all heads as `random_attention` gives them.

    `form` is as in `attention_weights`.
    """
    of = shares(rank, ranks)

    def leaf(weight: Weight) -> torch.Tensor:
        out = full[weight.names[0]].new_zeros(weight.local(of))
        into = out.mT if weight.transposed else out
        for place in weight.places(of):
            rows = full[place.name][place.rows or slice(None)]
            part = rows[:, place.columns] if place.columns else rows
            into[place.at][..., : part.shape[-1]] = part
        return out

    weights = attention_weights(config, **form)
    own: AttentionParams[torch.Tensor] = pytree.tree_map(leaf, weights)
    return own
