"""A captured program: the device has its launches as a graph, and a step is one replay.

    the first call     runs the program launch by launch, which shows what its rules give and how much scratch they
                       need, and then captures it; capturing runs nothing
    every other call   refuses other states than the captured ones, fills the graph's inputs, replays, updates

A graph reads and writes addresses, so what a call brings is copied to where the
graph reads: all integers by one copy from pinned memory, a floating input by one
of its own, unless it is there already.  States are those of the first call for
good.  Results are the graph's memory.  All graphs of a device share one pool:
they run one at a time, in any order, since one thread issues them and each
comes behind the last.  What one returns is held, so no graph that is captured
later is given it; but it may lie where one that was captured before has passing
values.  So results hold until the next replay of any.

A launch with integers on the host, `Program.updatable`, is captured with the
integers of one step.  A device that updates launches (an NPU) has it as a task
group behind an external event: every step calls the operator anew with the
step's integers, which only tells the group, on a stream for updates, and
records the event.  All of these come, in order, behind the end of the replay
before, as an event on the stream of updates: an update that came earlier would
be of a group that has yet to run, and a record would be reset by the wait of
the step before.  The host waits for nothing.  On a device that updates nothing
(a GPU) such integers are inputs like the others, and rules of their own work
on them.  Source: torch.cuda.graphs; torch_npu's NPUGraph and its task groups,
as vllm-ascend uses them.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import define, evolve, field, frozen

from mla_fx.backends.body import Writer
from mla_fx.backends.device import Device, Issued, Pool
from mla_fx.backends.prepared import Prepared
from mla_fx.backends.rows import Body, RunError
from mla_fx.backends.staging import Staging
from mla_fx.effects import Input, InputError, Launch, Program

if TYPE_CHECKING:
    from mla_fx.backends.backend import Backend

#: Streams of the device: what is captured is issued on one, updates on the other.
CAPTURE, UPDATE = "(capture)", "(update)"
#: With these settings torch_npu does not capture, or hangs.
_REFUSED: Final = (("TASK_QUEUE_ENABLE", "2"), ("ASCEND_LAUNCH_BLOCKING", "1"))


def refusal(device: Device) -> str | None:
    """Why nothing is captured on a device, None where it can be."""
    if _graph(device.module) is None:
        return f"must be for a device that has graphs, as cuda and ascend have: got {device.kind}"
    for name, value in _REFUSED if updates(device) else ():
        if os.environ.get(name) == value:
            return f"must be done with another {name}: got {value}"
    return None


def updates(device: Device) -> bool:
    """Whether the device updates launches of a graph."""
    return hasattr(device.module, "graph_task_group_begin")


def _graph(module: Any) -> Callable[[], Any] | None:
    found: Callable[[], Any] | None = getattr(module, "NPUGraph", None) or getattr(module, "CUDAGraph", None)
    return found


@frozen(eq=False)
class Task:
    """A launch that is updated: its operator, over which tensors, where its integers are among the leaves."""

    launch: Launch
    call: Issued
    tensors: tuple[torch.Tensor, ...]
    places: tuple[int, ...]
    handle: Any
    event: Any


@define(eq=False)
class Recorder:
    """Calls the rows of a program that is being captured, and makes tasks of the launches that are updated."""

    device: Device
    body: Body
    updated: frozenset[Launch]
    place: dict[tuple[str, int], int]  # of an input and a rank, among the leaves
    leaves: Sequence[Any]
    tasks: list[Task] = field(factory=list)
    current: tuple[Launch | None, int | None] = (None, None)

    def call(self, number: int, function: Callable[..., Sequence[Any]], operands: Sequence[Any]) -> Sequence[Any]:
        """A row; raises `InputError` for a launch whose integers would stay those of this step."""
        self.current = self.body.of[number]
        before = len(self.tasks)
        results = self.body.held(number, function, operands)
        due = int(self.current[0] in self.updated)
        if len(self.tasks) - before != due:
            raise InputError(
                f"capture: a rule must call its operator once by Device.issue where integers on the host change: got "
                f"{len(self.tasks) - before} calls"
            )
        return results

    def issue(self, call: Issued, tensors: Sequence[torch.Tensor], host: tuple[tuple[int, ...], ...]) -> None:
        """See `Device.issue`."""
        launch, rank = self.current
        assert launch is not None and rank is not None
        if launch not in self.updated:
            call(tensors, host)
            return
        places = tuple(self.place[launch.operands[position], rank] for position in sorted(launch.op.on_host()))
        if tuple(self.leaves[place] for place in places) != host:
            raise InputError(f"capture: a rule must issue the integers of its op as they are: got {host}")
        module = self.device.module
        stream, event = module.current_stream(), module.ExternalEvent()
        event.wait(stream)
        event.reset(stream)
        module.graph_task_group_begin(stream)
        call(tensors, host)
        handle = module.graph_task_group_end(stream)
        self.tasks.append(Task(launch, call, tuple(map(self.device.unowned, tensors)), places, handle, event))


@define(eq=False)
class Captured:
    """The body of a captured executable: from the leaves of a call to its outputs.

    The rest are places among the leaves: of states, of what is sent, of what is copied on the device, and of inputs
    with a rank.
    """

    program: Program
    body: Body
    device: Device
    place: dict[tuple[str, int], int]
    states: tuple[int, ...]
    sent: tuple[int, ...]
    copied: tuple[int, ...]
    staging: Staging | None
    asks: tuple[tuple[Callable[..., str | None], Launch, tuple[Any, ...]], ...]
    graph: Any = None
    pool: Pool | None = None
    static: list[Any] = field(factory=list)  # what the graph reads, where the leaves are
    results: list[Any] = field(factory=list)  # what the graph gives, in order; None where an output is an input
    tasks: list[Task] = field(factory=list)
    rooms: dict[str, int] = field(factory=dict)  # bytes of each workspace
    replayed: Any = None  # the event behind the last replay

    @classmethod
    def of(cls, program: Program, backend: "Backend", prepared: Prepared | None) -> "Captured":
        """Raises `InputError` where the device captures nothing, or a rule waits, or wants integers not updated."""
        device, ranks, table = backend.device, backend.here, backend.table
        if backend.adversary is not None or (why := refusal(device)):
            raise InputError(f"capture: {why if backend.adversary is None else 'must not be on the hostile machine'}")
        _must_not_wait(program)
        updated = updates(device)
        if not updated:
            _must_take_tensors(program, backend)
            backend = evolve(backend, table=table.for_capture())
        inputs = [put for put in program.inputs if put.role != "parameter"]
        place = {(put.name, rank): k * len(ranks) + r for k, put in enumerate(inputs) for r, rank in enumerate(ranks)}
        kept = set(program.states()) | {put.name for put in inputs if put.role == "state"}
        sent = [put for put in inputs if put.place == "staged" or (put.place == "host" and not updated)]
        copied = [put for put in inputs if put.place == "device" and put.name not in kept]

        def of(some: Iterable[Input]) -> tuple[int, ...]:
            return tuple(place[put.name, rank] for put in some for rank in ranks)

        avals = [put.aval for put in sent for _ in ranks]
        return cls(
            program=program,
            body=Writer(program, backend, prepared, captured=True).write(),
            device=device,
            place=place,
            states=of(put for put in inputs if put.name in kept),
            sent=of(sent),
            copied=of(copied),
            staging=Staging.of(avals, device, stays=True) if avals else None,
            asks=_asks(program, backend, place) if updated else (),
        )

    def __call__(self, leaves: list[Any]) -> Sequence[Any]:
        """Run the step; raises `InputError` for other states, or integers that no update takes, before it has begun."""
        self._accept(leaves)
        device = self.device
        streams = (*self.body.others, device.stream(CAPTURE), device.stream(UPDATE))
        caller = device.enter(streams)
        try:
            if self.graph is None:
                return self._first(leaves, caller)
            self._fill(leaves)
            self.graph.replay()
            if self.tasks:
                self._update(leaves, caller)
            return [leaves[at] if own is None else own for at, own in zip(self.body.taken, self.results, strict=True)]
        except BaseException:
            device.module.synchronize()
            raise
        finally:
            device.leave(caller)

    def _accept(self, leaves: Sequence[Any]) -> None:
        for at in self.states if self.graph is not None else ():
            if leaves[at] is not self.static[at]:
                name, rank = next(which for which, place in self.place.items() if place == at)
                raise InputError(f"{name} of rank {rank}: must be the tensor that was captured: got another")
        for ask, launch, operands in self.asks:
            why = ask(launch.op, *(leaves[one] if isinstance(one, int) else one for one in operands))
            if why is not None:
                raise InputError(f"capture: {launch.op.name} cannot be updated: {why}")

    def _fill(self, leaves: Sequence[Any]) -> None:
        """Bring a call's inputs to where the graph reads them, on the caller's stream."""
        static = self.static
        if self.staging is not None:
            arrived = self.staging.send(*(_tensor(leaves[at]) for at in self.sent))
            for at, view in zip(self.sent, arrived, strict=True):
                static[at] = view
        for at in self.copied:
            if leaves[at].data_ptr() != static[at].data_ptr():
                static[at].copy_(leaves[at])

    def _first(self, leaves: Sequence[Any], caller: Any) -> Sequence[Any]:
        """Run launch by launch, and capture."""
        self.static = list(leaves)
        with torch.inference_mode(False):  # or nothing could be copied there outside of it
            for at in self.copied:
                self.static[at] = torch.empty_like(leaves[at], memory_format=torch.contiguous_format)
            self._fill(leaves)
        values = list(self.static)
        self.body.issue(values)
        outputs = [leaves[at] if at < len(leaves) else values[at] for at in self.body.taken]
        values = list(self.static)
        graph, recorder = self._capture(values, caller)
        self.results = [None if at < len(leaves) else values[at] for at in self.body.taken]
        self.tasks, self.graph = recorder.tasks, graph
        self.replayed = self.device.module.Event()
        self.replayed.record(caller)
        return outputs

    def _capture(self, values: list[Any], caller: Any) -> tuple[Any, Recorder]:
        """The graph of the program's launches, in which `values` become what is there at the end."""
        device, module = self.device, self.device.module
        make, pool = _graph(module), device.shared_pool()
        assert make is not None
        graph, stream = make(), device.stream(CAPTURE)
        updated = frozenset(self.program.updatable()) if updates(device) else frozenset[Launch]()
        recorder = Recorder(device, self.body, updated, self.place, tuple(self.static))
        module.synchronize()
        module.empty_cache()  # so that the pool can have what the first run has used
        module.set_stream(stream)
        device.caller, device.recorder = stream, recorder
        try:
            graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
            try:
                self.body.issue(values, recorder.call)
            except BaseException:
                module.set_stream(stream)
                with suppress(RuntimeError):  # what is half captured may have no end
                    graph.capture_end()
                raise
            module.set_stream(stream)  # where it began
            graph.capture_end()
        finally:
            device.caller, device.recorder = caller, None
            module.set_stream(caller)
        self.pool, self.rooms = pool, device.rooms(self.program.workspaces())
        return graph, recorder

    def _update(self, leaves: Sequence[Any], caller: Any) -> None:
        """Tell every task the integers of this step, and let it go."""
        module, stream = self.device.module, self.device.stream(UPDATE)
        stream.wait_event(self.replayed)
        module.set_stream(stream)
        tasks = iter(self.tasks)
        try:
            for task in tasks:
                module.graph_task_update_begin(stream, task.handle)
                task.call(task.tensors, tuple(leaves[at] for at in task.places))
                module.graph_task_update_end(stream)
                task.event.record(stream)
        except Exception as error:
            for waiting in (task, *tasks):  # or the device would wait for good
                waiting.event.record(stream)
            raise RunError(task.launch, None, error) from error
        finally:
            module.set_stream(caller)
            self.replayed.record(caller)


def _tensor(leaf: Any) -> torch.Tensor:
    return leaf if isinstance(leaf, torch.Tensor) else torch.tensor(leaf, dtype=torch.int64)


def _must_not_wait(program: Program) -> None:
    """Refuse a launch that waits for the device, which runs nothing while it is captured."""
    for launch in program.launches:
        if launch.op.waits:
            raise InputError(f"capture: must be of a program that waits for nothing: got {launch.where}")


def _must_take_tensors(program: Program, backend: "Backend") -> None:
    """Refuse a launch whose integers stay on the host for its rule, where the device updates none."""
    for launch in program.launches:
        if launch.op.on_host() and type(launch.op) not in backend.table.captured:
            raise InputError(
                f"capture: {launch.where} must have a rule that takes integers on the device, where launches are not "
                f"updated: got none in backend {backend.name}"
            )


def _asks(
    program: Program, backend: "Backend", place: dict[tuple[str, int], int]
) -> tuple[tuple[Callable[..., str | None], Launch, tuple[Any, ...]], ...]:
    """What is asked of integers before each replay, once however many launches ask: operands are places or avals.

    Of avals alone it is asked here: raises `InputError` for what is updated to no integers.
    """
    avals = program.avals()
    found: dict[Any, tuple[Callable[..., str | None], Launch, tuple[Any, ...]]] = {}
    for launch in program.updatable():
        ask = backend.table.updates.get(type(launch.op))
        if ask is None:
            continue
        if why := ask(launch.op, *(avals[name] for name in launch.operands)):
            raise InputError(f"capture: {launch.op.name} cannot be updated: {why}")
        for rank in backend.here:
            operands = tuple(
                place[name, rank] if position in launch.op.on_host() else avals[name]
                for position, name in enumerate(launch.operands)
            )
            found.setdefault((launch.op, operands), (ask, launch, operands))
    return tuple(found.values())
