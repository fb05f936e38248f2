"""A decode step ready to run: small model, parameters, caches and batches of every rank."""

from typing import Any

import torch
from attrs import frozen

from mla_fx import MlaConfig, Sharding, StepShape, Yarn, attention_step, decode_stack, plan_batch
from mla_fx.backends.inputs import DTYPES
from mla_fx.batch import Planned
from mla_fx.effects import Step
from mla_fx.parameters import Cache, LayerParams, random_attention, shard_attention

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


@frozen
class Setup:
    """`layers` None: the attention of one layer; a number: a stack."""

    ranks: int = 2
    layers: int | None = None
    dtype: str = "fp32"
    requests: int = 2
    tokens: int = 3
    block_size: int = 4
    interleave: int = 1
    table_width: int = 6
    replicate_query: bool = False
    config: MlaConfig = CONFIG

    @property
    def shape(self) -> StepShape:
        return StepShape(
            ranks=self.ranks,
            tokens=self.tokens,
            requests=self.requests,
            blocks=self.requests * self.table_width,
            block_size=self.block_size,
            table_width=self.table_width,
            dtype=self.dtype,
            replicate_query=self.replicate_query,
        )

    @property
    def step(self) -> Step:
        if self.layers is None:
            return attention_step(self.config, self.shape)
        return decode_stack(self.config, self.shape, layers=self.layers)

    def params(self, seed: int = 0) -> list[Any]:
        """Per rank."""
        generator = torch.Generator().manual_seed(seed)
        full = [random_attention(self.config, generator=generator) for _ in range(self.layers or 1)]
        dtype = DTYPES[self.dtype]

        def of(rank: int) -> Any:
            shards = [
                shard_attention(f, self.config, rank=rank, ranks=self.ranks, replicate_query=self.replicate_query)
                for f in full
            ]
            cast = torch.utils._pytree.tree_map(lambda t: t.to(dtype), shards)
            norm = torch.ones(self.config.hidden_size, dtype=dtype)
            return cast[0] if self.layers is None else [LayerParams(norm, shard) for shard in cast]

        return [of(rank) for rank in range(self.ranks)]

    def caches(self, seed: int = 1) -> list[Any]:
        """Per rank, filled with noise: there is a history wherever a length says so."""
        generator = torch.Generator().manual_seed(seed)

        def cache() -> Cache:
            rows = (self.shape.blocks, self.block_size)
            sizes = (self.config.kv_lora_rank, self.config.qk_rope_head_dim)
            return Cache(*(torch.randn(*rows, size, generator=generator).to(DTYPES[self.dtype]) for size in sizes))

        return [cache() if self.layers is None else [cache() for _ in range(self.layers)] for _ in range(self.ranks)]

    def hidden(self, seed: int = 2) -> list[torch.Tensor]:
        x = torch.randn(self.tokens, self.config.hidden_size, generator=torch.Generator().manual_seed(seed))
        return [x.to(DTYPES[self.dtype])] * self.ranks

    def batches(self, history: tuple[int, ...] = (9, 5), query: tuple[int, ...] = (1, 2)) -> list[Planned]:
        width = self.table_width
        return plan_batch(
            Sharding(ranks=self.ranks, interleave=self.interleave, block_size=self.block_size),
            history=history,
            query=query,
            block_table=[list(range(b * width, (b + 1) * width)) for b in range(len(query))],
            blocks=self.shape.blocks,
            tokens=self.tokens,
            requests=self.requests,
            table_width=width,
        )

    def arguments(self) -> tuple[Any, ...]:
        return self.params(), self.caches(), self.hidden(), self.batches()
