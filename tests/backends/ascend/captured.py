"""A program captured beside itself as it is, on the emulated CANN, and steps for both."""

from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from mla_fx import backends, orchestrations
from mla_fx.backends import Backend
from mla_fx.effects import Program, schedule
from tests.backends.ascend.steps import LATENT
from tests.setups import Setup

#: The last request is padding's.
GIVEN = Setup(dtype="bf16", config=LATENT, ranks=2, tokens=4, requests=4, block_size=16, table_width=2)


def batches(given: Setup, rng: np.random.Generator) -> list[Any]:
    """Empty shards, requests without tokens, full ones, padding; every token is a request's."""
    requests = int(rng.integers(1, given.requests))
    query = rng.multinomial(rng.integers(0, given.tokens + 1), np.ones(requests) / requests)
    most = given.ranks * given.block_size * given.table_width - query
    history = [int(rng.choice([0, 1, rng.integers(0, top + 1)])) for top in most]
    padding = given.tokens - int(query.sum())
    return given.batches(history=(*history, 0), query=(*map(int, query), padding))


def host(tree: Any) -> list[torch.Tensor]:
    return [leaf.cpu() for leaf in pytree.tree_leaves(tree)]


class Pair:
    """A program captured, and as it is, each on caches of its own."""

    def __init__(self, given: Setup, orchestration: str, backend: Backend | None = None, lower: bool = True) -> None:
        self.given, self.backend = given, backend or backends.get("ascend", ranks=given.ranks)
        step = self.backend.lower(given.step) if lower else given.step
        self.program: Program = schedule(step, orchestrations.NAMED[orchestration])
        params, caches = given.params(), given.caches()
        prepared = self.backend.prepare(self.program, [params[rank] for rank in self.backend.here])
        self.captured, self.eager = (self.backend.compile(self.program, prepared, capture=how) for how in (True, False))
        mine = [caches[rank] for rank in self.backend.here]
        self.caches = [self.backend.put(mine, copy=True) for _ in range(2)]

    def step(self, run: Any, caches: Any, number: int, of_ranks: list[Any]) -> list[torch.Tensor]:
        hidden, *_ = self.given.hidden(seed=number)
        own = [of_ranks[rank] for rank in self.backend.here]
        return host(run(caches, self.backend.put([hidden] * len(own)), own))

    def same(self, number: int, of_ranks: list[Any]) -> None:
        got, want = (
            self.step(run, caches, number, of_ranks)
            for run, caches in zip((self.captured, self.eager), self.caches, strict=True)
        )
        assert all(map(torch.equal, got, want)), f"step {number}"
