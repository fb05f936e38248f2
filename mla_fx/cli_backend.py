"""The backend that a command asks for, emulated where it asks for that, and the sizes that all commands have."""

import argparse
import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from mla_fx import StepShape, attention_step, backends
from mla_fx.backends import Backend
from mla_fx.cli_group import joined, place
from mla_fx.effects import InputError
from mla_fx.layout import Layout, layout_of
from mla_fx.models import ModelConfig


@contextlib.contextmanager
def together(options: argparse.Namespace) -> Iterator[None]:
    """The device of `--backend`, ready for use, the `Layout` that is asked for, and the group of processes or None.

    They are `options.layout` and `options.group`.  Without `--layout` and `--ranks` there is a rank for each process.
    """
    keep_freed()
    if options.emulate:
        if options.backend != "ascend":
            raise InputError(f"--emulate: is for --backend ascend: got --backend {options.backend}")
        from mla_fx.backends.ascend.emulator import emulate

        emulate(seed=options.adversary or 0)
    found = place()
    size = None if found is None else found[1]
    if options.processes not in (None, size):
        raise InputError(f"--processes: must be as many as there are, {size}: got {options.processes}")
    options.layout = _layout(options, size or 2)
    options.group = None
    if found is None:
        yield
        return
    with joined(options.backend, options.timeout) as options.group:
        yield


def keep_freed() -> bool:
    """Let the process keep the memory that it frees, for its next step; whether its C library can be told to.

    glibc gives large values back to the system when a step has dropped them, and the next step gets them anew, page by
    page.  It is a setting of the whole process, so it is for programs, as commands are, and not for a library.
    """
    libc = ctypes.CDLL(None)
    mmap_max, trim_threshold = -4, -1  # of malloc.h: no mapping for a value, and no trimming
    return hasattr(libc, "mallopt") and bool(libc.mallopt(mmap_max, 0) and libc.mallopt(trim_threshold, -1))


def _layout(options: argparse.Namespace, ranks: int) -> Layout:
    if options.layout is None:
        return layout_of(options.ranks or ranks)
    layout = Layout.parse(options.layout)
    if options.ranks not in (None, layout.size):
        raise InputError(f"--ranks: must be those of --layout, {layout.size}, or not be given: got {options.ranks}")
    return layout


def chosen(options: argparse.Namespace, name: str | None = None) -> Backend:
    """`--backend`, or the one called `name`, in one process or in this process's group."""
    seed = None if options.emulate or name else options.adversary  # the emulator has it
    if options.group is None:
        return backends.get(name or options.backend, ranks=options.layout, adversary=seed)
    group = options.group if name is None else dist.new_group(backend="gloo")
    return backends.get(name or options.backend, ranks=options.layout, adversary=seed, group=group)


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
    """The fields of a `StepShape` that every command asks for, each by its own name; `ranks` may be a layout."""
    names = ("block_size", "replicate_query", "project_before_merge", "round_angles", "quantization")
    return {name: getattr(options, name) for name in names} | {"ranks": getattr(options, "layout", options.ranks)}
