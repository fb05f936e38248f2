"""The backend that a command asks for, emulated where it asks for that."""

import argparse

from mla_fx import backends
from mla_fx.backends import Backend
from mla_fx.effects import InputError
from mla_fx.models import ModelConfig


def chosen(options: argparse.Namespace) -> Backend:
    """`--backend`, with `--emulate` over the emulated CANN; `--adversary` is the seed of either hostile machine."""
    if not options.emulate:
        return backends.get(options.backend, ranks=options.ranks, adversary=options.adversary)
    if options.backend != "ascend":
        raise InputError(f"--emulate: is for --backend ascend: got --backend {options.backend}")
    from mla_fx.backends.ascend.emulator import emulate

    emulate(seed=options.adversary or 0)
    return backends.get("ascend", ranks=options.ranks)


def dtype(options: argparse.Namespace, config: ModelConfig) -> str:
    """`--dtype`; by default bf16, but where the attention operator of Ascend does not take the model's sizes, fp32."""
    if options.dtype:
        asked: str = options.dtype
        return asked
    if options.backend == "ascend":
        from mla_fx.backends.ascend.calls.attention import LATENT, ROPE

        if (config.attention.kv_lora_rank, config.attention.qk_rope_head_dim) != (LATENT, ROPE):
            return "fp32"
    return "bf16"
