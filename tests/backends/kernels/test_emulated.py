"""A decode step with the kernels around its exchange, launched on the emulated NPU: the numbers, whatever the seed."""

import pytest
import torch
from attrs import evolve
from torch.utils import _pytree as pytree

from mla_fx import backends, orchestrations
from mla_fx.backends.ascend.fused.merge_attention import MergeAttention
from mla_fx.backends.kernels import with_kernels
from mla_fx.effects import schedule
from tests.backends.ascend.conftest import processes  # noqa: F401
from tests.backends.ascend.counting import CONFIG
from tests.backends.ascend.ranks import start
from tests.backends.kernels.emulated import launched
from tests.backends.kernels.interpreter import why_not
from tests.processes import Member
from tests.setups import Setup

GIVEN = Setup(dtype="bf16", config=CONFIG, block_size=16, ranks=1)
SEEDS = range(3)


def results(member: Member, *, given: Setup) -> list[list[torch.Tensor]]:
    """By the operators, then by the kernels under every seed."""
    machine, group = start(member)
    plain = backends.get("ascend", ranks=member.ranks, group=group)
    kernels = evolve(plain, table=with_kernels(plain.table, merges=(MergeAttention,)))
    found = []
    with launched(machine):
        for backend, seeds in ((plain, SEEDS[:1]), (kernels, SEEDS)):
            program = schedule(backend.lower(given.step), orchestrations.attention_aside)
            run = given.compiled(backend, program)
            for seed in seeds:
                machine.seed(seed)
                own = [[argument[member.rank]] for argument in given.arguments()]
                out = run(*backend.put(own, copy=True))
                found.append([leaf.cpu() for leaf in pytree.tree_leaves(out)])
    return found


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_the_numbers_are_those_of_the_operators(processes):  # noqa: F811
    """bf16 of the interpreter is cut off, where operators round; the caches are the same."""
    operators, *seeds = processes.run(results, ranks=1, given=GIVEN)[0]
    for found in seeds:
        assert all(map(torch.equal, found, seeds[0]))
    for ours, theirs in zip(seeds[0], operators, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=2**-6, atol=2**-7)
        assert not ours.isnan().any()
