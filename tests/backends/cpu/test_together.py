"""Rules for several ranks at once: the bits of the rule of one rank, for each of them, however their operands lie.

Whole steps are in `tests/backends/test_shared_work.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from mla_fx.backends import cpu
from mla_fx.backends.device import HOST, Run
from mla_fx.effects import Group, Op, ops

RANKS = 3
DRAW = torch.Generator().manual_seed(3)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=DRAW).to(dtype)


def by_columns(x: torch.Tensor) -> torch.Tensor:
    return x.mT.contiguous().mT


def among_others(x: torch.Tensor) -> torch.Tensor:
    """Rows with as much room behind each as it has itself."""
    return torch.cat([x, torch.full_like(x, torch.nan)], -1)[..., : x.shape[-1]]


#: By op its parameters, and its operands in a dtype; the first of them is laid out in several ways.
CASES: dict[type[Op], tuple[dict[str, Any], Callable[[torch.dtype], list[Any]]]] = {
    ops.Swiglu: ({}, lambda kind: [drawn(5, 64, dtype=kind)]),
    ops.RmsNorm: ({"epsilon": 1e-6}, lambda kind: [drawn(5, 48, dtype=kind), drawn(48, dtype=kind)]),
    ops.Add: ({}, lambda kind: [drawn(5, 48, dtype=kind), drawn(5, 48, dtype=kind)]),
    ops.Rope: ({"heads": 2}, lambda kind: [drawn(5, 48, dtype=kind), drawn(5, 16), drawn(5, 16)]),
    ops.VUp: ({"group": None, "flat": True}, lambda kind: [drawn(5, 2, 24, dtype=kind), drawn(2, 24, 16, dtype=kind)]),
    ops.PermuteTokens: (
        {"own": 2, "group": Group("ep", RANKS)},
        lambda kind: [drawn(5, 48, dtype=kind), torch.randint(0, 6, (5, 2), generator=DRAW, dtype=torch.int32)],
    ),
    ops.Embedding: (
        {"vocabulary": 17, "group": Group("tp", RANKS)},
        lambda kind: [torch.randint(-1, 17, (5,), generator=DRAW), drawn(6, 48, dtype=kind)],
    ),
    ops.WriteRows: ({}, lambda kind: [drawn(3, 4, 24, dtype=kind), drawn(3, 24, dtype=kind), torch.tensor([7, -1, 0])]),
}
LYING: dict[str, Sequence[Callable[[torch.Tensor], torch.Tensor]]] = {
    "side by side": [torch.clone] * RANKS,
    "one another way": [torch.clone, by_columns, among_others],
    "all another way": [among_others] * RANKS,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("op", CASES, ids=lambda op: op.__name__)
def test_each_rank_is_given_what_its_own_rule_gives(op: type[Op], dtype: torch.dtype) -> None:
    parameters, make = CASES[op]
    for name, lying in LYING.items():
        operands = [make(dtype) for _ in range(RANKS)]
        if op is not ops.WriteRows and operands[0][0].dim() > 1:  # a state lies side by side, and so do numbers
            operands = [[way(x), *others] for way, (x, *others) in zip(lying, operands, strict=True)]
        runs = [Run(rank, HOST, rank) for rank in range(RANKS)]
        copies = [[one.clone() if op is ops.WriteRows else one for one in mine] for mine in operands]
        found = cpu.TABLE.together[op](*map(list, zip(*copies, strict=True)), runs=runs, **parameters)
        for rank, run in enumerate(runs):
            wanted = cpu.TABLE.rules[op](*operands[rank], run=run, **parameters)
            for of_ranks, one in zip(found, wanted, strict=True):
                rows = slice(int(wanted[1].sum())) if op is ops.PermuteTokens and one.dtype == dtype else slice(None)
                assert torch.equal(of_ranks[rank][rows], one[rows]), (name, rank)
