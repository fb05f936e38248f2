"""Decode steps of a size that the attention operator takes, and what came of running one."""

from typing import Any

import torch
from attrs import evolve
from torch.utils import _pytree as pytree

from mla_fx import backends
from mla_fx.backends import Backend
from mla_fx.effects import Program
from tests.setups import CONFIG, Setup

#: L and R as the operator wants them; everything else small, and sizes that V-up and absorption take fused.
LATENT = evolve(CONFIG, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=16, v_head_dim=16)


def setup(dtype: str, **sizes: Any) -> Setup:
    if dtype == "fp32":
        return Setup(dtype=dtype, **sizes)
    return Setup(dtype=dtype, config=LATENT, block_size=16, **sizes)


def streams(backend: Backend) -> dict[int, str]:
    """Name of every stream of the device by its handle; main is the one that is current here."""
    named = {"main": torch.npu.current_stream(), **backend.device.streams}
    return {stream.npu_stream: name for name, stream in named.items()}


def events(backend: Backend) -> dict[int, str]:
    """Name of every event of programs by its handle."""
    return {event.npu_event: name for name, event in backend.device.events.items()}


class Trial:
    """A program compiled once, legal or not, to be run again and again on the same arguments."""

    def __init__(self, backend: Backend, program: Program, setup: Setup, **batch: Any) -> None:
        self.run = setup.compiled(backend, program, unchecked=True)
        self.given = backend.put((setup.caches(), setup.hidden(), setup.batches(**batch)))

    def __call__(self) -> list[torch.Tensor]:
        """Outputs and new caches of one step, on the host; the given caches stay as they are."""
        caches, *rest = self.given
        fresh = pytree.tree_map(lambda cache: cache.clone(), caches)
        return [leaf.cpu() for leaf in pytree.tree_leaves(self.run(fresh, *rest))]


def leaves(backend: Backend, program: Program, setup: Setup, **batch: Any) -> list[torch.Tensor]:
    """Outputs and new caches of one step, on the host."""
    return Trial(backend, program, setup, **batch)()


def ascend(ranks: int) -> Backend:
    return backends.get("ascend", ranks=ranks)


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))  # NaN is not equal to itself
