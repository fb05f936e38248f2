"""Requests laid out over ranks and blocks by hand, poisoned wherever nothing may look.

The layout is dealt out position by position, not with the code under test.
"""

import random

import torch
from attrs import field, frozen

from mla_fx import Sharding, StepShape, plan_batch
from mla_fx.batch import Planned
from mla_fx.dtypes import DTYPES
from mla_fx.layout import Layout, layout_of
from mla_fx.parameters import Cache
from tests.oracles import owner_by_walking


@frozen
class Case:
    """Requests of a step: `history` cached and `query` new tokens each; sizes of the model's attention."""

    history: tuple[int, ...]
    query: tuple[int, ...]
    layout: Layout = field(default=2, converter=layout_of, alias="ranks")  # of one replica
    interleave: int = 1
    block_size: int = 4
    heads: int = 2  # of one rank
    latent: int = 16
    rope: int = 8
    dtype: str = "fp64"
    padding: int = 1  # tokens and requests
    sharpness: float = 1.0  # factor on the queries: large for large scores
    seed: int = 0

    @property
    def ranks(self) -> int:
        return self.layout.size

    @property
    def sharding(self) -> Sharding:
        return Sharding(ranks=self.layout.dcp, interleave=self.interleave, block_size=self.block_size)

    @property
    def shape(self) -> StepShape:
        need = [
            max(-(-(h + q) // (self.block_size * self.layout.dcp)), 1)
            for h, q in zip(self.history, self.query, strict=True)
        ]
        return StepShape(
            ranks=self.layout,
            tokens=sum(self.query) + self.padding,
            requests=len(self.query) + self.padding,
            blocks=sum(need) + 2,
            block_size=self.block_size,
            table_width=max(need, default=1) + 2,
            dtype=self.dtype,
        )


@frozen
class Sequences:
    """A case filled with numbers: whole sequences for the oracle, shards for the code."""

    case: Case
    q_latent: torch.Tensor  # [T, H, L]
    q_rope: torch.Tensor  # [T, H, R]
    latents: list[torch.Tensor]  # per request [S, L]
    ropes: list[torch.Tensor]  # per request [S, R]
    caches: list[Cache[torch.Tensor]]  # per rank
    batches: list[Planned]  # per rank

    def new(self, rows: list[torch.Tensor]) -> torch.Tensor:
        """The new tokens' rows of all requests, padded."""
        case = self.case
        parts = [r[h:] for r, h in zip(rows, case.history, strict=True)]
        return torch.cat([*parts, rows[0].new_full((case.padding, rows[0].shape[1]), 7.0)])

    def per_rank(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Heads of every rank, [T, N, ...]."""
        return [part.clone() for part in x.chunk(self.case.ranks, dim=1)]


def fill(case: Case) -> Sequences:
    """Numbers for a case; cache rows that hold no history are NaN, table tails are garbage."""
    generator = torch.Generator().manual_seed(case.seed)
    dtype, shape = DTYPES[case.dtype], case.shape

    def randn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64).to(dtype)

    totals = [h + q for h, q in zip(case.history, case.query, strict=True)]
    latents = [randn(total, case.latent) for total in totals]
    ropes = [randn(total, case.rope) for total in totals]
    heads = case.heads * case.ranks
    tables = _tables(case, totals)
    caches = [
        Cache(
            torch.full((shape.blocks, case.block_size, case.latent), torch.nan, dtype=dtype),
            torch.full((shape.blocks, case.block_size, case.rope), torch.nan, dtype=dtype),
        )
        for _ in range(case.layout.dcp)
    ]
    for b, seen in enumerate(case.history):
        used = [0] * case.layout.dcp
        for p, owner in enumerate(owner_by_walking(seen, case.layout.dcp, case.interleave)):
            block, row = tables[b][used[owner] // case.block_size], used[owner] % case.block_size
            caches[owner].latent[block, row] = latents[b][p]
            caches[owner].rope[block, row] = ropes[b][p]
            used[owner] += 1
    batches = plan_batch(
        case.sharding,
        history=case.history,
        query=case.query,
        block_table=tables,
        blocks=shape.blocks,
        tokens=shape.tokens,
        requests=shape.requests,
        table_width=shape.table_width,
    )
    queries = [
        (case.sharpness * randn(shape.tokens, heads, size).double()).to(dtype) for size in (case.latent, case.rope)
    ]
    copies = case.layout.tp // case.layout.dcp  # one context group beside the other
    caches = [Cache(*(part.clone() for part in cache)) for _ in range(copies) for cache in caches]
    return Sequences(case, *queries, latents, ropes, caches, batches * copies)


def _tables(case: Case, totals: list[int]) -> list[list[int]]:
    """Blocks in shuffled order, then entries that no block has."""
    ids = list(range(case.shape.blocks))
    random.Random(case.seed).shuffle(ids)
    tables = []
    for total in totals:
        need = -(-total // (case.block_size * case.layout.dcp))
        tables.append([ids.pop() for _ in range(need)] + [2147480000] * (case.shape.table_width - need))
    return tables
