"""Rules for several ranks at once: the bits of the rule of one rank, for each of them, however their operands lie.

Whole steps are in `tests/backends/test_shared_work.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from mla_fx.backends import cpu
from mla_fx.backends.cpu import products
from mla_fx.backends.device import HOST, Run
from mla_fx.backends.rules import parameters
from mla_fx.backends.several import Several
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


Make = Callable[[torch.dtype], list[Any]]
EXPERTS, TENSOR = Group("ep", RANKS), Group("tp", RANKS)


def chosen(kind: torch.dtype) -> list[Any]:
    return [drawn(5, 48, dtype=kind), torch.randint(0, 6, (5, 2), generator=DRAW, dtype=torch.int32)]


def looked_up(kind: torch.dtype) -> list[Any]:
    return [torch.randint(-1, 17, (5,), generator=DRAW), drawn(6, 48, dtype=kind)]


def written(kind: torch.dtype) -> list[Any]:
    return [drawn(3, 4, 24, dtype=kind), drawn(3, 24, dtype=kind), torch.tensor([7, -1, 0])]


#: Ops, and their operands in a dtype; the first of them is laid out in several ways.
CASES: tuple[tuple[Op, Make], ...] = (
    (ops.Swiglu(), lambda kind: [drawn(5, 64, dtype=kind)]),
    (ops.RmsNorm(epsilon=1e-6), lambda kind: [drawn(5, 48, dtype=kind), drawn(48, dtype=kind)]),
    (ops.Add(), lambda kind: [drawn(5, 48, dtype=kind), drawn(5, 48, dtype=kind)]),
    (ops.Rope(heads=2), lambda kind: [drawn(5, 48, dtype=kind), drawn(5, 16), drawn(5, 16)]),
    (ops.Linear(), lambda kind: [drawn(5, 40, dtype=kind), products.packed(drawn(32, 40, dtype=kind))]),
    (ops.VUp(group=None, flat=True), lambda kind: [drawn(5, 2, 24, dtype=kind), drawn(2, 24, 16, dtype=kind)]),
    (ops.PermuteTokens(own=2, group=EXPERTS), chosen),
    (ops.Embedding(vocabulary=17, group=TENSOR), looked_up),
    (ops.WriteRows(), written),
)


def in_one_piece(tensors: Sequence[torch.Tensor]) -> Several:
    """As results of a rule for several ranks lie."""
    made = Several.empty(len(tensors), tensors[0].shape, tensors[0].dtype)
    for mine, one in zip(made, tensors, strict=True):
        mine.copy_(one)
    return made


LYING: dict[str, Sequence[Callable[[torch.Tensor], torch.Tensor]]] = {
    "side by side": [torch.clone] * RANKS,
    "in one piece": [torch.clone] * RANKS,
    "one another way": [torch.clone, by_columns, among_others],
    "all another way": [among_others] * RANKS,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("op, make", CASES, ids=[op.name for op, _ in CASES])
def test_each_rank_is_given_what_its_own_rule_gives(op: Op, make: Make, dtype: torch.dtype) -> None:
    kind, given, in_place = type(op), parameters(op), op.written()
    for name, lying in LYING.items():
        operands = [make(dtype) for _ in range(RANKS)]
        if not in_place and operands[0][0].dim() > 1:  # a state lies side by side, and so do numbers
            operands = [[way(x), *others] for way, (x, *others) in zip(lying, operands, strict=True)]
        runs = [Run(rank, HOST, rank) for rank in range(RANKS)]
        copies = [[one.clone() if in_place else one for one in mine] for mine in operands]
        first, *others = zip(*copies, strict=True)
        gathered = in_one_piece if name == "in one piece" else Several
        found = cpu.TABLE.together[kind](gathered(first), *map(Several, others), runs=runs, **given)
        for rank, run in enumerate(runs):
            wanted = cpu.TABLE.rules[kind](*operands[rank], run=run, **given)
            for of_ranks, one in zip(found, wanted, strict=True):
                rows = slice(int(wanted[1].sum())) if kind is ops.PermuteTokens and one.dtype == dtype else slice(None)
                assert torch.equal(of_ranks[rank][rows], one[rows]), (name, rank)
