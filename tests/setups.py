"""A decode step ready to run: small model, parameters, caches and batches of every rank."""

import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen
from torch.utils import _pytree as pytree

from mla_fx import MlaConfig, MoeConfig, Sharding, StepShape, Yarn, attention_step
from mla_fx.backends import Backend, Executable
from mla_fx.decode import plan_step
from mla_fx.dtypes import DTYPES
from mla_fx.effects import Program, Step
from mla_fx.layout import Layout, layout_of
from mla_fx.models import Checkpoint, Loader, ModelConfig, model_step, write_checkpoint
from mla_fx.models.quantize import quantize_int8
from mla_fx.parameters import Cache, Quantized
from mla_fx.weights import attention_weights, avals, random_attention, shard_attention, shares

#: Orchestrations that take any step with an attention; the others want layers, or a step of their own making.
ANYWHERE = ("serial", "exchange-aside", "attention-aside")

CONFIG = MlaConfig(
    hidden_size=24,
    num_attention_heads=8,
    q_lora_rank=12,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    yarn=Yarn(factor=4.0, original_max_position_embeddings=16, mscale_all_dim=0.7),
)

MOE = MoeConfig(
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=6,
    n_shared_experts=1,
    n_group=2,
    topk_group=1,
    routed_scaling_factor=2.5,
)


def model_config(layers: int, attention: MlaConfig = CONFIG) -> ModelConfig:
    """A model whose first layer is dense and whose others have experts."""
    return ModelConfig(
        attention=attention,
        moe=MOE,
        num_hidden_layers=layers,
        vocab_size=19,
        intermediate_size=10,
        first_k_dense_replace=1,
        num_nextn_predict_layers=1,
    )


@lru_cache
def checkpoint(config: ModelConfig, seed: int = 0) -> Checkpoint:
    """A checkpoint with seeded weights, written once a run."""
    directory = Path(tempfile.mkdtemp(prefix="mla-fx-"))
    write_checkpoint(directory, config, seed=seed)
    return Checkpoint.open(directory)


@frozen
class Setup:
    """`layers` None: the attention of one layer; a number: a whole model.  Each replica has requests of its own."""

    layout: Layout = field(default=2, converter=layout_of, alias="ranks")
    layers: int | None = None
    dtype: str = "fp32"
    requests: int = 2
    tokens: int = 3
    block_size: int = 4
    interleave: int = 1
    table_width: int = 6
    replicate_query: bool = False
    project_before_merge: bool = False
    expand_current: bool = False
    round_angles: bool = False
    quantization: str | None = None
    split: str | None = None
    config: MlaConfig = CONFIG

    @property
    def ranks(self) -> int:
        return self.layout.size

    @property
    def shape(self) -> StepShape:
        return StepShape(
            ranks=self.layout,
            tokens=self.tokens,
            requests=self.requests,
            blocks=self.requests * self.table_width,
            block_size=self.block_size,
            table_width=self.table_width,
            dtype=self.dtype,
            replicate_query=self.replicate_query,
            project_before_merge=self.project_before_merge,
            expand_current=self.expand_current,
            round_angles=self.round_angles,
            quantization=self.quantization,
            split=self.split,
        )

    @property
    def step(self) -> Step:
        if self.layers is None:
            return attention_step(self.config, self.shape)
        return model_step(model_config(self.layers, self.config), self.shape)

    def params(self, seed: int = 0) -> list[Any]:
        """Per rank."""
        return [self._params(rank, seed) for rank in range(self.ranks)]

    def _params(self, rank: int, seed: int) -> Any:
        if self.layers is not None:
            return Loader(
                checkpoint=checkpoint(model_config(self.layers, self.config), seed),
                rank=rank,
                ranks=self.layout,
                dtype=DTYPES[self.dtype],
                quantization=self.quantization,
                **self.shape.form,
            ).model()
        full = random_attention(self.config, generator=torch.Generator().manual_seed(seed))
        own = shard_attention(full, self.config, rank=rank, ranks=self.layout, **self.shape.form)
        weights = attention_weights(self.config, **self.shape.form)
        wanted = avals(weights, shares(rank, self.layout), dtype=self.dtype, quantization=self.quantization)

        def as_wanted(aval: Any, leaf: torch.Tensor) -> Any:
            return quantize_int8(leaf) if isinstance(aval, Quantized) else leaf.to(DTYPES[self.dtype])

        return pytree.tree_map(as_wanted, wanted, own, is_leaf=lambda leaf: isinstance(leaf, Quantized))

    def caches(self, seed: int = 1) -> list[Any]:
        """Per rank, filled with noise: there is a history wherever a length says so; the same in context groups."""
        generator = torch.Generator().manual_seed(seed)

        def cache() -> Cache[torch.Tensor]:
            rows = (self.shape.blocks, self.block_size)
            sizes = (self.config.kv_lora_rank, self.config.qk_rope_head_dim)
            return Cache(*(torch.randn(*rows, size, generator=generator).to(DTYPES[self.dtype]) for size in sizes))

        def caches() -> Any:
            return cache() if self.layers is None else [cache() for _ in range(self.layers)]

        layout = self.layout
        drawn = [[caches() for _ in range(layout.dcp)] for _ in range(layout.dp)]
        own = [drawn[layout.replica(rank)][layout.index("dcp", rank)] for rank in range(self.ranks)]
        return [torch.utils._pytree.tree_map(torch.clone, one) for one in own]

    def hidden(self, seed: int = 2) -> list[torch.Tensor]:
        """What goes through the layers: hidden states, or the tokens of a model; of each replica its own."""

        def drawn(replica: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(seed + 100 * replica)
            if self.layers is not None:
                return torch.randint(19, (self.tokens,), generator=generator)
            return torch.randn(self.tokens, self.config.hidden_size, generator=generator).to(DTYPES[self.dtype])

        of_replicas = [drawn(replica) for replica in range(self.layout.dp)]
        return [of_replicas[self.layout.replica(rank)] for rank in range(self.ranks)]

    def batches(self, history: tuple[int, ...] = (9, 5), query: tuple[int, ...] = (1, 2)) -> list[Any]:
        """Per rank; replica d has d tokens more of history in each request."""
        width, layout = self.table_width, self.layout
        of_replicas = [
            plan_step(
                Sharding(ranks=layout.dcp, interleave=self.interleave, block_size=self.block_size),
                self.shape,
                history=[length + replica for length in history],
                query=query,
                block_table=[list(range(b * width, (b + 1) * width)) for b in range(len(query))],
            )
            for replica in range(layout.dp)
        ]
        return [of_replicas[layout.replica(rank)][layout.index("dcp", rank)] for rank in range(self.ranks)]

    def arguments(self) -> tuple[Any, ...]:
        """What a run takes; the parameters it is compiled with."""
        return self.caches(), self.hidden(), self.batches()

    def compiled(self, backend: Backend, program: Program, **how: Any) -> Executable:
        """A program of the step, with the parameters of the ranks that run here; `how` is as in `Backend.compile`."""
        params = [_kept(self, rank) for rank in backend.here]
        return backend.compile(program, backend.prepare(program, params), **how)


@lru_cache(maxsize=64)
def _kept(given: Setup, rank: int) -> Any:
    """Parameters that many programs are compiled with; nothing writes them."""
    return given._params(rank, 0)
