"""The work of several ranks in one process against that of one: a decoder layer, a new token behind a history.

What ranks have in common is done once (`mla_fx.backends.shared`), and what they have each is a part of the whole; what
is left is that a call costs what it costs, however small its part is.  Run with `make bench`, on one thread.
"""

import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from attrs import evolve

from mla_fx import MlaConfig, MoeConfig, Sharding, StepShape, backends, orchestrations
from mla_fx.backends import Backend
from mla_fx.decode import plan_step
from mla_fx.dtypes import DTYPES
from mla_fx.effects import schedule
from mla_fx.models import Checkpoint, Loader, ModelConfig, model_step, write_checkpoint
from mla_fx.parameters import Cache, empty_cache
from tests.benchmarks.table import Point

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
#: A vocabulary that costs nothing: what is left is the layers.
CONFIG = ModelConfig(
    attention=ATTENTION,
    moe=MOE,
    num_hidden_layers=1,
    vocab_size=64,
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
    ranks: int, *, dtype: str, history: int, requests: int = 1, block: int = 128, backend: Backend | None = None
) -> Callable[[], torch.Tensor]:
    """A step of the layer with a new token of each request behind so many cached ones; gives rank 0's logits.

    The caches have the same rows whatever the ranks, so the logits are about the same.
    """
    backend = backend or backends.get("cpu", ranks=ranks)
    columns = -(-(history + 1) // (block * ranks))
    blocks = requests * columns
    shape = StepShape(
        ranks=ranks,
        tokens=requests,
        requests=requests,
        blocks=blocks,
        block_size=block,
        table_width=columns,
        dtype=dtype,
    )
    config, sharding = CONFIG, Sharding(ranks=ranks, interleave=1, block_size=block)
    program = schedule(backend.lower(model_step(config, shape)), orchestrations.attention_aside)
    params = [Loader(checkpoint=checkpoint(), rank=r, ranks=ranks, dtype=DTYPES[dtype]).model() for r in range(ranks)]
    run = backend.compile(program, backend.prepare(program, params))
    batches = plan_step(
        sharding,
        shape,
        history=[history] * requests,
        query=[1] * requests,
        block_table=[list(range(b * columns, (b + 1) * columns)) for b in range(requests)],
    )
    caches = backend.put(_caches(ranks, columns, requests, block, dtype))
    tokens = torch.arange(requests)

    def step() -> torch.Tensor:
        logits, _ = run(caches, [tokens] * ranks, batches)
        result: torch.Tensor = logits[0]
        return result

    return step


def _caches(ranks: int, columns: int, requests: int, block: int, dtype: str) -> list[Any]:
    """Position p of a request on rank p % W, at row p // W of its part; noise, the same for any number of ranks."""
    rows, config = columns * block * ranks, ATTENTION
    made = []
    for rank in range(ranks):
        cache = empty_cache(config, blocks=requests * columns, block_size=block, dtype=DTYPES[dtype])[0]
        for b in range(requests):
            own = slice(b * columns, (b + 1) * columns)
            for part in cache:
                noise = torch.randn(rows, part.shape[2], generator=torch.Generator().manual_seed(b))
                part[own].view(-1, part.shape[2]).copy_(noise[rank::ranks])
        made.append([Cache(*cache)])
    return made


def points(whole: bool = False) -> Iterator[Point]:
    """Eight ranks against one; with `whole`, two and four as well, in both dtypes and lengths."""
    for dtype in ("bf16", "fp32"):
        for history in (1024, 8192) if whole else (1024,):
            for ranks in (2, 4, 8) if whole else (8,):
                ours, alone = (decoding(count, dtype=dtype, history=history) for count in (ranks, 1))
                name = f"{ranks} ranks, {dtype}, history of {history >> 10}k"
                yield Point("ranks", name, ours, {"one rank": alone}, dtype=dtype, least={"one rank": 0.5})


def test_what_is_measured_computes_the_same() -> None:
    """Ranks that share work have the bits of ranks apart, and about those of one."""
    backend = backends.get("cpu", ranks=8)
    shared, apart, alone = (
        decoding(ranks, dtype="fp32", history=256, backend=one)
        for ranks, one in ((8, backend), (8, evolve(backend, apart=True)), (1, None))
    )
    assert torch.equal(shared(), apart())
    torch.testing.assert_close(shared(), alone(), rtol=1e-4, atol=1e-4)
