"""What a layer gives the device of one rank to do, a rank in each process: counted on its trace, without a filter."""

from collections import Counter

import torch
from attrs import frozen

from mla_fx import MlaConfig, backends, orchestrations
from mla_fx.backends.ascend.emulator import Traced
from mla_fx.effects import schedule
from tests.backends.ascend.ranks import start
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


@frozen
class Counts:
    """`operators` called, `kernels` that they launch with strided operands made contiguous, and `collectives`."""

    operators: int
    kernels: int
    collectives: int


def traced(member: Member, *, given: Setup, fused: bool = True) -> list[Traced]:
    """What one step gives the device of this rank; a first step has made constants and workspaces."""
    machine, group = start(member)
    backend = backends.get("ascend", ranks=member.ranks, group=group)
    step = backend.lower(given.step) if fused else given.step
    program = schedule(step, orchestrations.attention_aside)
    run = backend.compile(program, backend.prepare(program, [given.params()[member.rank]]))
    own = [[argument[member.rank]] for argument in given.arguments()]
    run(*backend.put(own, copy=True))
    again = backend.put(own, copy=True)
    torch.npu.synchronize()
    member.tell(f"rank {member.rank} is ready")
    for rank in range(member.ranks):
        member.hear(f"rank {rank} is ready")
    with machine.tracing() as trace:
        run(*again)
    return trace


def counts(trace: list[Traced]) -> Counts:
    calls = [task for task in trace if task.kind == "operator"]
    collectives = sum(task.kind == "collective" for task in trace)
    return Counts(len(calls), sum(task.kernels for task in calls), collectives)


def names(trace: list[Traced]) -> Counter[str]:
    return Counter(task.name for task in trace if task.kind == "operator")
