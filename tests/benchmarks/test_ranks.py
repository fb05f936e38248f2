"""The work of several ranks in one process against that of one: a decoder layer, a new token behind a history.

What ranks have in common is done once (`mla_fx.backends.shared`), and what they have each is a part of the whole; what
is left is that a call costs what it costs, however small its part is.  Run with `make bench`, on one thread.
"""

import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from mla_fx import Layout, MlaConfig, MoeConfig, Sharding, StepShape, backends, orchestrations
from mla_fx.backends import Backend
from mla_fx.decode import plan_step
from mla_fx.dtypes import DTYPES
from mla_fx.effects import schedule
from mla_fx.layout import layout_of
from mla_fx.models import Checkpoint, Loader, ModelConfig, model_step, write_checkpoint
from mla_fx.parameters import Cache, empty_cache
from tests.benchmarks.table import Point, measure, pinned

ATTENTION = MlaConfig(
    hidden_size=2048,
    num_attention_heads=16,
    q_lora_rank=512,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
)
MOE = MoeConfig(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=1024, n_shared_experts=1)
#: The most that all ranks may take, in times of one.
MOST = 1.15
#: A vocabulary that costs nothing, a panel of a product on each of 8 ranks: what is left is the layers.
CONFIG = ModelConfig(
    attention=ATTENTION,
    moe=MOE,
    num_hidden_layers=1,
    vocab_size=128,
    intermediate_size=4096,
    first_k_dense_replace=0,
)


@cache
def checkpoint() -> Checkpoint:
    """A checkpoint with seeded weights in bf16, written once a run."""
    directory = Path(tempfile.mkdtemp(prefix="mla-fx-"))
    write_checkpoint(directory, CONFIG, dtype=torch.bfloat16)
    return Checkpoint.open(directory)


def decoding(
    ranks: int | Layout,
    *,
    dtype: str,
    history: int,
    requests: int = 1,
    block: int = 128,
    backend: Backend | None = None,
) -> Callable[[], torch.Tensor]:
    """A step of the layer with a new token of each request behind so many cached ones; gives logits of all replicas.

    `requests` are those of a replica.  The caches have the same rows whatever the ranks, so the logits are about the
    same.
    """
    layout = layout_of(ranks)
    backend = backend or backends.get("cpu", ranks=layout)
    columns = -(-(history + 1) // (block * layout.dcp))
    blocks = requests * columns
    shape = StepShape(
        ranks=layout,
        tokens=requests,
        requests=requests,
        blocks=blocks,
        block_size=block,
        table_width=columns,
        dtype=dtype,
    )
    config, sharding, every = CONFIG, Sharding(ranks=layout.dcp, interleave=1, block_size=block), range(layout.size)
    program = schedule(backend.lower(model_step(config, shape)), orchestrations.attention_aside)
    params = [Loader(checkpoint=checkpoint(), rank=r, ranks=layout, dtype=DTYPES[dtype]).model() for r in every]
    run = backend.compile(program, backend.prepare(program, params))
    group = plan_step(
        sharding,
        shape,
        history=[history] * requests,
        query=[1] * requests,
        block_table=[list(range(b * columns, (b + 1) * columns)) for b in range(requests)],
    )
    batches = [group[layout.index("dcp", rank)] for rank in every]
    caches = backend.put([_cache(layout, rank, columns, requests, block, dtype) for rank in every])
    of_replicas = torch.arange(layout.dp * requests).split(requests)
    tokens = [of_replicas[layout.replica(rank)] for rank in every]

    def step() -> torch.Tensor:
        logits, _ = run(caches, tokens, batches)
        return torch.cat(logits[:: layout.tp])

    return step


def _cache(layout: Layout, rank: int, columns: int, requests: int, block: int, dtype: str) -> Any:
    """Position p of a request on rank p % W of its group, at row p // W; noise, the same for any layout."""
    rows, first = columns * block * layout.dcp, layout.replica(rank) * requests
    cache = empty_cache(ATTENTION, blocks=requests * columns, block_size=block, dtype=DTYPES[dtype])[0]
    for b in range(requests):
        own = slice(b * columns, (b + 1) * columns)
        for part in cache:
            noise = torch.randn(rows, part.shape[2], generator=torch.Generator().manual_seed(first + b))
            part[own].view(-1, part.shape[2]).copy_(noise[layout.index("dcp", rank) :: layout.dcp])
    return [Cache(*cache)]


#: Eight ranks that share the whole sequence; and others that have more to do than one: where few or none share it, keys
#: are read by several, and two replicas read their weights twice.
LAYOUTS = (Layout(tp=8), Layout(tp=8, dcp=2), Layout(tp=8, dcp=1), Layout(tp=4, dp=2))


def points(whole: bool = False) -> Iterator[Point]:
    """Eight ranks against one; with `whole`, two and four as well, and other layouts."""
    for dtype in ("bf16", "fp32"):
        for history in (1024, 8192):
            for layout in (Layout(tp=2), Layout(tp=4), *LAYOUTS) if whole else LAYOUTS[:1]:
                yield point(layout, dtype, history)


def point(layout: Layout, dtype: str, history: int) -> Point:
    """All ranks of a layout against one rank with all requests, one of each replica."""
    ours = decoding(layout, dtype=dtype, history=history)
    alone = decoding(1, dtype=dtype, history=history, requests=layout.dp)
    name = f"{layout}, {dtype}, history of {history >> 10}k"
    least = {"one rank": 1 / MOST} if layout.dcp == layout.size else {}
    return Point("ranks", name, ours, {"one rank": alone}, dtype=dtype, least=least)


def test_what_is_measured_computes_the_same() -> None:
    """Ranks that share work have the bits of ranks apart, and about those of one."""
    backend = backends.get("cpu", ranks=8)
    shared, apart, alone = (
        decoding(ranks, dtype="fp32", history=256, backend=one)
        for ranks, one in ((8, backend), (8, evolve(backend, apart=True)), (1, None))
    )
    assert torch.equal(shared(), apart())
    torch.testing.assert_close(shared(), alone(), rtol=1e-4, atol=1e-4)


def test_layouts_compute_the_same() -> None:
    """All that are measured, against one rank."""
    for layout in LAYOUTS[1:]:
        ours, alone = (decoding(one, dtype="fp32", history=200, requests=2 // one.dp) for one in (layout, Layout(tp=1)))
        torch.testing.assert_close(ours(), alone(), rtol=1e-4, atol=1e-4)


@pytest.mark.bench
def test_eight_ranks_take_little_more_than_one() -> None:
    """Bits are those of ranks apart: tests/backends/test_shared_work.py."""
    with pinned(1):
        missed = {row.point.name: 1 / found for row in measure(points(), seconds=6) for found in row.missed.values()}
    assert not missed, f"must be at most {MOST} times one rank: {missed}"
