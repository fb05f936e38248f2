"""What a rank of a group of processes does in a test: functions of a member, run by `tests.processes`."""

import contextlib
import io
import os
from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from attrs import evolve
from torch.utils import _pytree as pytree

from mla_fx import Layout, backends, orchestrations
from mla_fx.backends import device
from mla_fx.backends.ascend.emulator import Machine, emulate
from mla_fx.backends.ascend.probe import POINTS, Case, Found, Outcome, Point, Site
from mla_fx.backends.ascend.probe.run import run
from mla_fx.backends.ascend.probe.site import grouped
from mla_fx.effects import InputError, Op, schedule
from tests.backends.ascend.captured import GIVEN, Pair, batches
from tests.backends.ascend.conftest import program_of
from tests.backends.ascend.steps import setup
from tests.ops.conftest import aval
from tests.processes import Member


def start(member: Member, *, seed: int = 0, patience: int = 90) -> tuple[Machine, Any]:
    """The device, and the group after its first collective, which makes the communicator."""
    os.environ["HCCL_EXEC_TIMEOUT"] = str(patience)
    machine, group = emulate(seed=seed), member.join("hccl")
    device("npu")
    total = torch.ones(1, device="npu")
    dist.all_reduce(total)
    assert total.item() == member.ranks
    return machine, group


def host(tree: Any) -> list[torch.Tensor]:
    return [leaf.cpu() for leaf in pytree.tree_leaves(tree)]


def printed(member: Member, *, code: str) -> str:
    """What code prints, in a process of its own that has loaded the emulated CANN."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    return out.getvalue()


def decode(
    member: Member,
    *,
    sizes: dict[str, Any],
    dtype: str,
    orchestration: str,
    seeds: int,
    together: int | Layout = 0,
) -> list[list[torch.Tensor]]:
    """Outputs and caches of one step under several seeds; `together`: of those ranks, all in this process."""
    machine, group = (emulate(), None) if together else start(member)
    given = setup(dtype, **{"ranks": together or member.ranks, **sizes})
    backend = backends.get("ascend", ranks=given.layout, **({} if together else {"group": group}))
    run = given.compiled(backend, schedule(given.step, orchestrations.NAMED[orchestration]))
    own = backend.put([[argument[rank] for rank in backend.here] for argument in given.arguments()])
    found = []
    for seed in range(seeds):
        machine.seed(seed * given.ranks + member.rank)
        caches, *rest = own
        found.append(host(run(pytree.tree_map(lambda cache: cache.clone(), caches), *rest)))
    return found


def steps(member: Member, *, dtype: str, queries: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """The output of several steps in a row; nothing is read on the host before the end."""
    machine, group = start(member)
    given = setup(dtype, ranks=member.ranks)
    backend = backends.get("ascend", ranks=member.ranks, group=group)
    run = given.compiled(backend, schedule(given.step, orchestrations.attention_aside))
    machine.seed(member.rank)
    caches, hidden, _ = backend.put([[argument[member.rank]] for argument in given.arguments()])
    outs, lengths = [], [0] * given.requests
    for query in queries:
        out, caches = run(caches, hidden, [given.batches(tuple(lengths), query)[member.rank]])
        outs.append(out[0])
        lengths = [length + new for length, new in zip(lengths, query, strict=True)]
    return host(outs)


def collectives(member: Member, *, asked: list[tuple[Op, list[tuple[torch.Tensor, ...]]]]) -> list[Any]:
    """Ops, each in a program of its own, on this rank's operands: results, and the collectives that ran."""
    machine, group = start(member, seed=member.rank)
    backend, found = backends.get("ascend", ranks=member.ranks, group=group), []
    for number, (op, operands) in enumerate(asked):
        own = operands[member.rank]
        run = backend.compile(program_of(op, map(aval, own)))
        given = [[backend.put(x)] for x in own]
        with machine.tracing() as trace:
            results = [out for (out,) in run(*given)]
            assert machine.ran() == 0, "the host waited"
            member.tell(f"rank {member.rank} has issued {number}")
            for rank in range(member.ranks):  # so that no peer waits long enough for help
                member.hear(f"rank {rank} has issued {number}")
        found.append((host(results), [task for task in trace if task.kind == "collective"]))
    return found


def places(member: Member) -> dict[str, Any]:
    """Where a process is before its backend is made and after, and where its memory, constants and streams are."""
    emulate()
    before, group = torch.npu.current_device(), member.join("hccl")
    given = setup("bf16", ranks=member.ranks)
    backend = backends.get("ascend", ranks=member.ranks, group=group)
    run = given.compiled(backend, schedule(given.step, orchestrations.attention_aside))
    ((out,), caches) = run(*backend.put([[argument[member.rank]] for argument in given.arguments()]))
    held = [*backend.device.constants.values(), *(of.memory for of in backend.device.scratch.values())]
    found = {leaf.device.index for leaf in (out, *pytree.tree_leaves(caches), *held)}
    streams = {stream.device.index for stream in backend.device.streams.values()}
    return {"before": before, "after": torch.npu.current_device(), "found": found | streams, "out": out.cpu()}


def no_device(member: Member, *, told: str) -> str:
    """What is said of a number that no device has."""
    os.environ["LOCAL_RANK"] = told
    emulate()
    try:
        backends.get("ascend")
    except InputError as error:
        assert torch.npu.current_device() == 0
        return str(error)
    return ""


# --- the group itself ------------------------------------------------------------


def transports(member: Member) -> dict[str, torch.Tensor]:
    """What the wheel's own process group does over the emulated HCCL."""
    start(member)
    rank, ranks = member.rank, member.ranks
    found: dict[str, torch.Tensor] = {}
    found["broadcast"] = torch.full((3,), float(rank), device="npu")
    dist.broadcast(found["broadcast"], ranks - 1)
    splits = [rank + other for other in range(ranks)]  # nothing from 0 to 0
    sent = (torch.arange(sum(splits), dtype=torch.float32) + 100 * rank).npu()
    found["uneven"] = torch.empty_like(sent)
    dist.all_to_all_single(found["uneven"], sent, splits, splits)
    found["scattered"] = torch.empty(2, device="npu")
    dist.reduce_scatter_single(found["scattered"], (torch.arange(2.0 * ranks) + rank).npu())
    for name, how in (("max", dist.ReduceOp.MAX), ("min", dist.ReduceOp.MIN)):
        found[name] = torch.tensor([rank, -rank], device="npu")
        dist.all_reduce(found[name], how)
    dist.barrier()
    pair = dist.new_group([0, ranks - 1])
    if rank in (0, ranks - 1):
        found["pair"] = torch.full((2,), float(rank), device="npu")
        dist.all_reduce(found["pair"], group=pair)
    if rank == 0:
        dist.send(torch.arange(5).npu(), ranks - 1)
    if rank == ranks - 1:
        found["sent"] = torch.zeros(5, dtype=torch.int64, device="npu")
        dist.recv(found["sent"], 0)
    return {name: value.cpu() for name, value in found.items()}


def sums(member: Member, *, operands: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    start(member, seed=member.rank)
    totals = [given[member.rank].npu() for given in operands]
    for total in totals:
        dist.all_reduce(total)
    return host(totals)


def overwritten(member: Member, *, seeds: int, waits: bool) -> list[float]:
    """An operand that is overwritten after the collective, or (not `waits`) without waiting for it."""
    machine, _ = start(member)
    found = []
    for seed in range(seeds):
        machine.seed(seed * member.ranks + member.rank)
        sent, got = torch.ones(8, device="npu"), torch.empty(8 * member.ranks, device="npu")
        torch.npu.synchronize()
        work = dist.all_gather_single(got, sent, async_op=True)
        if waits:
            work.wait()
        sent.zero_()
        work.wait()
        found.append(got.cpu().sum().item())
    return found


def elsewhere(member: Member) -> float:
    """While the peer of its collective is away, a process goes on with its other streams."""
    start(member)
    x = torch.ones(4, device="npu")
    if member.rank == 1:
        member.hear("rank 0 has a result")
    work = dist.all_reduce(x, async_op=True)
    if member.rank == 0:
        side = torch.npu.Stream()
        for _ in range(20):  # somewhere in there the collective gets to the head of its stream
            with torch.npu.stream(side):
                y = torch.full((4,), 3.0, device="npu") * 2
            side.synchronize()
        assert not work.is_completed()
        member.tell("rank 0 has a result")
        assert y.cpu().tolist() == [6.0] * 4
    work.wait()
    return x.cpu().sum().item()


def busy(member: Member) -> float:
    """A host that waits for its peer's word instead of its own device: the device gets on all the same."""
    start(member)
    x = torch.ones(4, device="npu")
    dist.all_reduce(x)
    if member.rank == 0:
        member.hear("rank 1 has a result")
    else:
        torch.npu.synchronize()
        member.tell("rank 1 has a result")
    return x.cpu().sum().item()


def two_groups(member: Member) -> list[float]:
    """Two groups whose collectives are issued in another order on each rank: only one group's order counts."""
    start(member)
    groups = [dist.new_group(range(member.ranks)) for _ in range(2)]
    operands = [torch.full((2,), float(k + member.rank), device="npu") for k in range(2)]
    for k in (0, 1):
        dist.all_reduce(torch.ones(1, device="npu"), group=groups[k])
    torch.npu.synchronize()
    works = [dist.all_reduce(operands[k], group=groups[k], async_op=True) for k in ((0, 1), (1, 0))[member.rank % 2]]
    for work in works:
        work.wait()
    return [x.cpu().sum().item() for x in operands]


# --- what goes wrong ---------------------------------------------------------------


def mismatch(member: Member, *, what: str) -> None:
    """The last rank issues something else."""
    start(member)
    odd = member.rank == member.ranks - 1
    x = torch.ones(4, device="npu")
    if what == "op" and odd:
        dist.all_gather_single(torch.empty(4 * member.ranks, device="npu"), x)
    elif what == "count" and odd:
        dist.all_reduce(torch.ones(6, device="npu"))
    elif what == "dtype" and odd:
        dist.all_reduce(x.half())
    elif what == "splits":
        splits = [1] * member.ranks
        awaited = [2 if odd and not rank else 1 for rank in range(member.ranks)]
        sent = torch.ones(member.ranks, device="npu")
        dist.all_to_all_single(torch.empty(sum(awaited), device="npu"), sent, awaited, splits)
    else:
        dist.all_reduce(x)
    torch.npu.synchronize()


def absence(member: Member, *, how: str) -> None:
    """The last rank ends, leaves or stays away."""
    start(member, patience=4 if how == "stays away" else 90)
    if member.rank == member.ranks - 1:
        if how == "ends":
            os._exit(7)
        if how == "leaves":
            dist.destroy_process_group()
        for rank in range(member.rank):
            member.hear(f"rank {rank} has failed")
        return
    x = torch.ones(4, device="npu")
    dist.all_reduce(x)
    try:
        torch.npu.synchronize()
    finally:
        member.tell(f"rank {member.rank} has failed")


def recovered(member: Member) -> list[str]:
    """After a fault that threw a collective away, the group says that it is of no use any more."""
    machine, _ = start(member)
    x = torch.ones(4 + member.rank, device="npu")
    messages = []
    for _ in range(2):
        try:
            dist.all_reduce(x)
            torch.npu.synchronize()
        except RuntimeError as error:
            messages.append(str(error))
            machine.recover()
    return messages


# --- what a probe asks of a group --------------------------------------------------


def probe(member: Member, *, last: str) -> list[Found]:
    """Points 11 and 12; the last rank is "well", "tidy", "refuses" to add or has "died" before."""
    emulate(seed=member.rank)
    member.join("gloo")
    how = last if member.rank == member.ranks - 1 else "well"
    if how == "tidy":
        _tidy()
    if how == "refuses":
        dist.all_reduce = partial(_refused, dist.all_reduce, count(1))
    first = Case("first", _beyond if how == "died" else lambda site: Outcome("holds"))
    return list(run(grouped(Site((9, 1))), [Point(1, "", "", (first,), lambda found, cann: ""), *POINTS[10:12]]))


def _beyond(site: Site) -> Outcome:
    torch.index_select(torch.zeros(3).npu(), 0, torch.tensor([99]).npu())
    return Outcome("holds")


def _refused(add: Any, calls: Iterator[int], total: torch.Tensor, **how: Any) -> None:
    """The last of a case's three sums, and none that another rank waits for."""
    add(total, **how)
    if next(calls) % 3 == 0:
        raise RuntimeError("not so")


def _tidy() -> None:
    """Take bits for numbers, and round sums another way."""
    for name in ("all_gather_single", "all_to_all_single"):
        setattr(dist, name, partial(_numbers, getattr(dist, name)))
    dist.all_reduce = partial(_rounded, dist.all_reduce)


def _numbers(move: Any, found: torch.Tensor, sent: torch.Tensor, **how: Any) -> None:
    move(found, sent, **how)
    found.view(torch.bfloat16).copy_(found.view(torch.bfloat16).float())


def _rounded(add: Any, total: torch.Tensor, **how: Any) -> None:
    add(total, **how)
    total[-1:].mul_(1 + 2**-7)


def captured(member: Member, *, steps: int) -> bool:
    """Whether captured steps are eager ones, bit for bit, under other seeds in every process."""
    machine, group = start(member)
    given = evolve(GIVEN, ranks=member.ranks)
    backend = backends.get("ascend", ranks=member.ranks, group=group)
    pair, rng = Pair(given, "attention-aside", backend), np.random.default_rng(7)
    for number in range(steps):
        machine.seed(10 * number + member.rank)
        pair.same(number, batches(given, rng))
    return True


def no_capture(member: Member, *, what: str) -> str:
    """Why nothing is captured: the environment forbids it, or there is no room for what is captured."""
    if what == "task queue 2":
        os.environ["TASK_QUEUE_ENABLE"] = "2"
    machine = emulate()
    side, x, outside = torch.npu.Stream(), torch.ones(4, device="npu"), torch.npu.current_stream().record_event()
    machine.limit(**{"streams": {"streams": 1}, "tasks": {"streams": 1, "tasks": 8}}.get(what, {}))
    try:
        with torch.npu.graph(torch.npu.NPUGraph()):
            main = torch.npu.current_stream()
            for _ in range(8):
                x = x + 1
            if what == "streams":
                side.wait_stream(main)
            if what == "outside":
                main.wait_event(outside)
            if what == "pageable":
                x.copy_(torch.ones(4), non_blocking=True)
            main.record_event()
    except RuntimeError as error:
        return str(error)
    return "captured"


def room(member: Member) -> list[str]:
    """Where there is room for two graphs: what is said of a third one, and of a fourth when the first is gone."""
    emulate().limit(streams=2)
    graphs, refused = [torch.npu.NPUGraph() for _ in range(4)], []
    torch.npu.set_stream(torch.npu.Stream())
    for number, graph in enumerate(graphs):
        if number == 3:
            graphs[0].reset()
        try:
            graph.capture_begin()
            graph.capture_end()
        except RuntimeError as error:
            refused.append(str(error))
    return refused


def replayed(member: Member, *, seeds: int) -> tuple[list[list[float]], list[list[str]]]:
    """A captured sum over all ranks and an exchange of its doubles, replayed with other inputs; eager ones in between.

    Returns what each replay gave, and which collectives it ran by the trace, without the eager one.
    """
    machine, _ = start(member)
    sent, got = torch.zeros(member.ranks, device="npu"), torch.zeros(member.ranks, device="npu")
    graph, found, ran = torch.npu.NPUGraph(), [], []
    with torch.npu.graph(graph):
        total = sent * 1
        dist.all_reduce(total)
        dist.all_to_all_single(got, total * 2 + sent)
        got += 1
    for seed in range(seeds):
        machine.seed(seed * member.ranks + member.rank)
        between = torch.ones(1, device="npu")
        with machine.tracing() as trace:
            sent.fill_(10.0 * seed + member.rank)
            graph.replay()
            dist.all_reduce(between)
        found.append([*got.tolist(), between.item()])
        ran.append([task.name for task in trace if task.kind == "collective" and task.graph])
    return found, ran


def unequal_replays(member: Member) -> str:
    """One rank replays its graph, the other one runs another collective: why the host's wait ends."""
    start(member)
    x, graph = torch.ones(4, device="npu"), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        dist.all_reduce(x)
    if member.rank == 0:
        graph.replay()
    else:
        dist.broadcast(x, 0)
    try:
        torch.npu.synchronize()
    except RuntimeError as error:
        return str(error)
    return ""


def sanitized(member: Member, *, names: tuple[str, ...]) -> dict[str, Any]:
    """What torch_npu's stream sanitizer says, which touches the device when it is imported."""
    from tests.backends.ascend.sanitized import told

    return told(*names)
