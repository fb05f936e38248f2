"""What a layer gives the device of one rank to do, a rank in each process: counted on its trace, without a filter."""

from contextlib import nullcontext
from typing import Any

import torch
from attrs import evolve, frozen

from mla_fx import MlaConfig, backends, orchestrations
from mla_fx.backends.ascend.emulator import Machine, Traced
from mla_fx.backends.ascend.fused.merge_attention import MergeAttention
from mla_fx.backends.kernels import with_kernels
from mla_fx.effects import schedule
from tests.backends.ascend import before
from tests.backends.ascend.ranks import start
from tests.backends.kernels.emulated import launched
from tests.processes import Member
from tests.setups import Setup

#: The head of DeepSeek-V3 (128 + 64, latent 512, value 128) in a model that is narrow otherwise.
CONFIG = MlaConfig(
    hidden_size=256,
    num_attention_heads=16,
    q_lora_rank=128,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
)


#: What the first product of a layer begins with.
FIRST = ("aclnnMatmul", "aclnnGroupedMatmulV5", "aclnnDynamicQuantV2")


@frozen
class Counts:
    """`operators` called, `kernels` that they launch with strided operands made contiguous, and `collectives`."""

    operators: int
    kernels: int
    collectives: int


def traced(member: Member, *, rows: dict[str, tuple[Setup, str]]) -> dict[str, list[Traced]]:
    """What the attention of a layer gives the device of this rank, from its first product on, in each row's way.

    "fused" is as the backend lowers it, "kernels" the same with what goes around the exchange as kernels, "apart" as it
    is described, "before" in the order and with the copies of `tests.backends.ascend.before`.  One step of each; a
    first one has made constants and workspaces.
    """
    machine, group = start(member)
    kernels = any(how == "kernels" for _, how in rows.values())
    with launched(machine, played=False) if kernels else nullcontext():
        return {name: _traced(member, machine, group, given=given, how=how) for name, (given, how) in rows.items()}


def _traced(member: Member, machine: Machine, group: Any, *, given: Setup, how: str) -> list[Traced]:
    backend = backends.get("ascend", ranks=member.ranks, group=group, sums="transport")
    if how == "kernels":
        backend = evolve(backend, table=with_kernels(backend.table, merges=(MergeAttention,)))
    lowered = how in ("fused", "kernels")
    program = schedule(backend.lower(given.step) if lowered else given.step, orchestrations.attention_aside)
    if how == "before":
        backend = backend.with_rules(before.RULES)
        program = schedule(before.step(given), before.exchange_aside, mode="conservative")
    run = given.compiled(backend, program)
    own = [[argument[member.rank]] for argument in given.arguments()]
    run(*backend.put(own, copy=True))
    again = backend.put(own, copy=True)
    torch.npu.synchronize()
    with machine.tracing() as trace:
        run(*again)
    first = next(k for k, task in enumerate(trace) if task.name in FIRST)
    return trace[first:]


def counts(trace: list[Traced]) -> Counts:
    """Of a trace."""
    calls = [task for task in trace if task.kind == "operator"]
    collectives = sum(task.kind == "collective" for task in trace)
    return Counts(len(calls), sum(task.kernels for task in calls), collectives)
