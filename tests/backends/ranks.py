"""What a rank of a group on the host does in a test: functions of a member, run by `tests.processes`."""

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch.utils import _pytree as pytree

from mla_fx import backends, orchestrations
from mla_fx.backends import Backend, Executable
from mla_fx.backends.meter import Metered
from mla_fx.dtypes import DTYPES
from mla_fx.effects import Aval, InputError, Op, Program, Step, bind, schedule, trace
from mla_fx.layout import Layout
from tests.processes import Member
from tests.setups import Setup

NAMES = {dtype: name for name, dtype in DTYPES.items()}


def alone(op: Op, operands: tuple[torch.Tensor, ...]) -> Step:
    """A step of nothing but an op, for operands like these."""
    avals = {f"x{k}": Aval(tuple(x.shape), NAMES[x.dtype]) for k, x in enumerate(operands)}
    return trace(lambda **values: bind(op, *values.values()), op.name, **avals)


@frozen
class Asked:
    """A step that is ready to run: made once, where the ranks of a group are asked for it, and not by each of them."""

    layout: Layout
    program: Program
    params: list[Any]
    arguments: tuple[Any, ...]

    @classmethod
    def of(cls, setup: Setup) -> "Asked":
        """The setup's own."""
        program = schedule(setup.step, orchestrations.attention_aside)
        return cls(setup.layout, program, setup.params(), setup.arguments())

    def compiled(self, backend: Backend) -> Executable:
        """With the parameters of the ranks that run here."""
        own = [self.params[rank] for rank in backend.here]
        return backend.compile(self.program, backend.prepare(self.program, own))

    def own(self, backend: Backend) -> Any:
        """The arguments of the ranks that run here."""
        return backend.put([[of_ranks[rank] for rank in backend.here] for of_ranks in self.arguments], copy=True)


def decode(member: Member, *, name: str, asked: Asked, together: bool = False) -> list[list[torch.Tensor]]:
    """Output and caches of one step, of each rank that runs here: this one's, or all where they are `together`."""
    group = {} if together else {"group": member.join("gloo")}
    backend = backends.get(name, ranks=asked.layout, **group)
    run, own = asked.compiled(backend), asked.own(backend)
    return [pytree.tree_leaves(of_rank) for of_rank in zip(*run(*own), strict=True)]


def collective(member: Member, *, op: Op, operands: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    """Results of one op, on this rank's `operands`."""
    backend = backends.get("cpu", ranks=member.ranks, group=member.join("gloo"))
    own = operands[member.rank]
    run = backend.compile(schedule(alone(op, own), orchestrations.serial))
    return [out for (out,) in run(*([x] for x in own))]


def shared(member: Member, *, said: list[Any]) -> list[Any]:
    """What the ranks told each other, one round after the other."""
    backend = backends.get("cpu", ranks=member.ranks, group=member.join("gloo"))
    return [backend.share(of_ranks[member.rank]) for of_ranks in said]


def sums(
    member: Member, *, operands: list[list[torch.Tensor]], sums: str, spent: bool = False, planted: bool = False
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Sums of this rank's `operands`, and what is left of these; `planted`: by a transport that adds in any order."""
    group = member.join("gloo")
    if planted:
        dist.all_reduce = _as_each_likes
    world, own = backends.Processes(group, member.ranks, sums), operands[member.rank]
    return [world.move("all_reduce", [x], group="tp", spent=spent)[0] for x in own], own


def _as_each_likes(total: torch.Tensor, group: Any, async_op: bool) -> Any:
    """A sum that each rank begins with its own part."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    every = [torch.empty_like(total) for _ in range(ranks)]
    work = dist.all_gather(every, total, group=group, async_op=async_op)
    work.wait()
    total.copy_(sum(every[(rank + k) % ranks].float() for k in range(ranks)))
    return work


def messages(member: Member, *, operands: list[list[torch.Tensor]], sums: str) -> list[tuple[str, int]]:
    """The collectives that the sum of the first operand is made of, each with the bytes that it takes."""
    asked: list[tuple[str, int]] = []
    group = member.join("gloo")
    world = backends.Processes(group, member.ranks, sums)

    def noting(how: str, real: Callable[..., Any], position: int) -> Callable[..., Any]:
        def noted(*tensors: torch.Tensor, **given: Any) -> Any:
            asked.append((how, tensors[position].nbytes))
            return real(*tensors, **given)

        return noted

    for how, name, position in (
        ("all_reduce", "all_reduce", 0),
        ("all_to_all", "all_to_all_single", 1),
        ("all_gather", "all_gather_single", 1),
    ):
        setattr(dist, name, noting(how, getattr(dist, name), position))
    world.move("all_reduce", operands[member.rank], group="tp")
    return asked


def refusals(member: Member) -> list[str]:
    """What is said of wrong use."""
    early = [
        refused(lambda group=group: backends.get("cpu", ranks=2, group=group)) for group in (dist.group.WORLD, "x")
    ]
    group, setup = member.join("gloo"), Setup(ranks=member.ranks)
    run = setup.compiled(backends.get("cpu", ranks=2, group=group), schedule(setup.step, orchestrations.serial))
    wrong: list[Any] = [
        lambda: backends.get("cpu", ranks=3, group=group),
        lambda: backends.get("cpu", ranks=2, group=group, sums="mean"),  # type: ignore[arg-type]
        lambda: backends.get("cpu", ranks=2, adversary=5, group=group),
        lambda: run(*setup.arguments()),
    ]
    return [*early, *map(refused, wrong)]


def refused(use: Callable[[], Any]) -> str:
    """The message of an `InputError`."""
    try:
        use()
    except InputError as error:
        return str(error)
    return "taken"


def stranger(member: Member) -> None:
    """Rank 1 uses a group that it is not in."""
    member.join("gloo")
    backends.get("cpu", ranks=1, group=dist.new_group([0]))


def misfortune(member: Member) -> None:
    """An error, an end, a hang."""
    if member.rank == 0:
        raise ZeroDivisionError
    if member.rank == 1:
        os._exit(3)
    time.sleep(60)


def metered(member: Member, *, asked: Asked) -> tuple[dict[Any, Any], int]:
    """What a step moves from this rank, by place, and the most that its values take."""
    counting = Metered.of(backends.get("cpu", ranks=asked.layout, group=member.join("gloo")))
    asked.compiled(counting)(*asked.own(counting))
    return dict(counting.meter.moved), counting.meter.values[member.rank]
