"""`mla-fx show --device-trace`: what one step of a program gives to the device, from the emulated one."""

import argparse
import math

import torch
from torch.utils import _pytree as pytree

from mla_fx import Sharding, backends
from mla_fx.backends.ascend.emulator import Traced, emulate
from mla_fx.decode import StepShape, attention_avals, plan_step
from mla_fx.dtypes import DTYPES
from mla_fx.effects import Aval, InputError, Program, Record
from mla_fx.models import ModelConfig
from mla_fx.parameters import empty_cache


def device_trace(options: argparse.Namespace, config: ModelConfig, shape: StepShape, program: Program) -> int:
    """Run one step on the emulated device and print what ran, in the order in which it ran.

    All ranks are in this process and share its streams, so an operator of a launch runs once for each of them.
    """
    if options.layers is not None:
        raise InputError(f"--device-trace: runs the attention of one layer: got --layers {options.layers}")
    if options.tokens > shape.blocks:
        raise InputError(f"--device-trace: takes at most {shape.blocks} tokens: got --tokens {options.tokens}")
    emulator = emulate(seed=options.seed)
    backend = backends.get("ascend", ranks=options.ranks)
    params, given = _given(config, shape)
    run = backend.compile(program, backend.prepare(program, params))
    arguments = backend.put(given)
    run(*arguments)  # the first step makes constants and workspaces
    with emulator.tracing() as trace:
        run(*arguments)
    device = backend.device
    streams = {device.stream(name).npu_stream: name for name in program.streams}
    events = {device.event(e.event).npu_event: e.event for e in program.effects if isinstance(e, Record)}
    ours = [task for task in trace if task.stream in streams]
    width = max(len(name) for name in streams.values())
    for task in ours:
        print(f"{streams[task.stream]:<{width}}  {_line(task, events)}")
    operators = [task for task in ours if task.kind == "operator"]
    kernels = sum(task.kernels for task in operators)
    moved = sum(task.bytes_ for task in ours if task.kind in ("to_device", "to_host", "on_device"))
    counted = f"{len(operators)} operators in {kernels} kernels"
    print(f"\n{len(ours)} tasks of {shape.ranks} ranks: {counted}, {moved} bytes copied beside them")
    return 0


def _line(task: Traced, events: dict[int, str]) -> str:
    if task.kind in ("record", "wait"):
        return f"{task.kind} {events.get(task.event, 'of a buffer that was sent')}"
    if task.kind == "operator":
        shapes = ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for dtype, shape in task.results)
        return f"{task.name.removeprefix('aclnn')} -> {shapes}    {task.bytes_} bytes"
    return f"{task.kind}    {task.bytes_} bytes"


def _given(config: ModelConfig, shape: StepShape) -> tuple[list[object], tuple[object, ...]]:
    """Parameters; and hidden states at random, caches of zeros, a history of half a block for every request."""
    generator, ranks = torch.Generator().manual_seed(0), range(shape.ranks)

    def made(aval: Aval) -> torch.Tensor:
        if aval.dtype == "int8":
            return torch.randint(-127, 128, aval.shape, generator=generator, dtype=torch.int8)
        noise = torch.randn(aval.shape, generator=generator) / math.sqrt(aval.shape[-1])
        return noise.to(DTYPES[aval.dtype])

    params = [pytree.tree_map(made, attention_avals(config.attention, shape)) for _ in ranks]
    cache = {"blocks": shape.blocks, "block_size": shape.block_size, "dtype": DTYPES[shape.dtype]}
    caches = [empty_cache(config.attention, **cache)[0] for _ in ranks]  # type: ignore[arg-type]
    hidden = made(Aval((shape.tokens, config.attention.hidden_size), shape.dtype))
    batches = plan_step(
        Sharding(ranks=shape.ranks, block_size=shape.block_size),
        shape,
        history=[shape.block_size // 2] * shape.requests,
        query=[1] * shape.tokens,
        block_table=[[b] for b in range(shape.requests)],
    )
    return params, (caches, [hidden] * shape.ranks, batches)
