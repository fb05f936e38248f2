"""The backend that a command asks for, emulated where it asks for that, and the sizes that all commands have."""

import argparse
from typing import Any

from mla_fx import StepShape, attention_step, backends
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


def dtype(options: argparse.Namespace, config: ModelConfig, backend: Backend) -> str:
    """`--dtype`; by default bf16, but where the backend's operators take the model's attention in fp32 only, that."""
    if options.dtype:
        asked: str = options.dtype
        return asked
    return "fp32" if _refused(backend, config, "bf16") and not _refused(backend, config, "fp32") else "bf16"


def _refused(backend: Backend, config: ModelConfig, dtype: str) -> bool:
    """Whether some operator does not take the sizes of the model's attention, on one rank."""
    step = backend.lower(attention_step(config.attention, StepShape(dtype=dtype)))
    avals = step.avals()
    return any(backend.refusal(e.op, *(avals[name] for name in e.operands)) for e in step.equations)


def sizes(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of a `StepShape` that every command asks for, each by its own name."""
    names = ("ranks", "block_size", "replicate_query", "project_before_merge", "round_angles", "quantization")
    return {name: getattr(options, name) for name in names}
