"""What a capture refuses, each with its status; and that the device is usable behind it."""

import ctypes
import threading
import time

import pytest
import torch

from tests.backends.ascend import ranks as do

pytestmark = pytest.mark.usefixtures("default_stream")


@pytest.fixture
def default_stream(emulator):
    """The wheel's context of a capture stays on its stream where the capture's end is refused."""
    yield
    torch.npu.set_stream(torch.npu.default_stream())


def pinned() -> torch.Tensor:
    return torch.ones(4).pin_memory()


def asked(x: torch.Tensor) -> None:
    """As long as its record is in the wheel's host queue, the wheel says no by itself."""
    event = torch.npu.current_stream().record_event()
    for _ in range(50):
        event.query()
        time.sleep(0.01 if torch.npu.is_current_stream_capturing() else 0)


#: What waits for the host, by name: a statement about `x`, a tensor that was made in the capture, and the refusal.
WAITS = {
    "stream": (
        lambda x: torch.npu.current_stream().synchronize(),
        "107027",
        "Not allow to synchronize captured-stream",
    ),
    "stream-query": (lambda x: torch.npu.current_stream().query(), "107027", "Not allow to synchronize"),
    "device": (lambda x: torch.npu.synchronize(), "107027", "Not allow to synchronize captured-stream"),
    "event": (lambda x: torch.npu.current_stream().record_event().synchronize(), "107028", "in a capture that goes on"),
    "query": (asked, "107028", "in a capture that goes on"),
    "item": (lambda x: x.sum().item(), "107027", "Not allow to synchronize captured-stream"),
    "to-host": (lambda x: x.cpu(), "107030", "the specified capture mode is not relaxed"),
    "to-device": (lambda x: torch.ones(4).npu(), "107030", "the specified capture mode is not relaxed"),
    "list": (lambda x: torch.tensor([1, 2], device="npu"), "107030", "the specified capture mode is not relaxed"),
    "size": (lambda x: x.nonzero(), "1070", "captur"),
}


@pytest.mark.parametrize("name", WAITS)
def test_nothing_waits_for_the_host(emulator, name):
    """The same outside is right; inside it is refused, and afterwards the device works."""
    ask, status, message = WAITS[name]
    ask(torch.ones(4, device="npu") * 2)
    with pytest.raises(RuntimeError, match=rf"{status}[\s\S]*{message}"), torch.npu.graph(torch.npu.NPUGraph()):
        ask(torch.ones(4, device="npu") * 2)
    assert (torch.ones(4, device="npu") + 1).tolist() == [2.0] * 4


def test_copies_between_pinned_memory_and_the_device_are_captured(emulator):
    """They read and write that memory at every replay, which the host waits for."""
    source, target, graph = pinned(), pinned(), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        target.copy_(source.to("npu", non_blocking=True) + 1, non_blocking=True)
    for value in (3, 4):
        source.fill_(value)
        graph.replay()
        torch.npu.synchronize()
        assert target.tolist() == [value + 1.0] * 4


def test_relaxed_captures_let_others_block(emulator):
    """A blocking copy in another thread is for the mode of the capture to allow."""
    found: list[str] = []

    def elsewhere() -> None:
        try:
            found.append(str(torch.ones(1).npu().shape))
        except RuntimeError as error:
            found.append("107030" if "107030" in str(error) else str(error))

    for mode in ("global", "thread_local", "relaxed"):
        with torch.npu.graph(torch.npu.NPUGraph(), capture_error_mode=mode):
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
    assert found == ["107030", "torch.Size([1])", "torch.Size([1])"]


def test_every_stream_joins(emulator):
    """One that is left out, one whose last record nobody waits for, one that goes on behind it."""
    side, x = torch.npu.Stream(), torch.ones(4, device="npu")

    def capture(*, recorded: bool, waited: bool, goes_on: bool) -> None:
        with torch.npu.graph(torch.npu.NPUGraph()):
            main = torch.npu.current_stream()
            side.wait_stream(main)
            with torch.npu.stream(side):
                y = x + 1
                done = side.record_event() if recorded else None
                if waited:
                    main.wait_event(done)
                if goes_on:
                    y + 1

    capture(recorded=True, waited=True, goes_on=False)
    for how in ((False, False, False), (True, False, False), (True, True, True)):
        with pytest.raises(RuntimeError, match=r"107025[\s\S]*was not joined to the original stream"):
            capture(**dict(zip(("recorded", "waited", "goes_on"), how, strict=True)))
    with torch.npu.stream(side):  # it is not captured any more
        assert (x + 1).tolist() == [2.0] * 4


def test_two_captures_do_not_meet(emulator):
    """Each on a stream of its own; a wait of one for the other ends both."""
    one, two = torch.npu.Stream(), torch.npu.Stream()
    runtime = emulator._runtime
    first, second = ctypes.c_void_p(one.npu_stream), ctypes.c_void_p(two.npu_stream)
    assert runtime.aclmdlRICaptureBegin(first, 0) == 0
    assert runtime.aclmdlRICaptureBegin(first, 0) == 107027
    assert runtime.aclmdlRICaptureBegin(second, 0) == 0
    event, graph = ctypes.c_void_p(), ctypes.c_void_p()
    runtime.aclrtCreateEventExWithFlag(ctypes.byref(event), 1)
    assert runtime.aclrtRecordEvent(event, first) == 0
    assert runtime.aclrtStreamWaitEvent(second, event) == 107032
    for stream in (first, second):
        assert runtime.aclmdlRICaptureEnd(stream, ctypes.byref(graph)) == 507903 and not graph
        assert runtime.aclmdlRICaptureEnd(stream, ctypes.byref(graph)) == 107029


def test_a_capture_ends_where_it_began(emulator):
    one, two, graph = torch.npu.Stream(), torch.npu.Stream(), torch.npu.NPUGraph()
    with torch.npu.stream(one):
        graph.capture_begin()
        two.wait_stream(one)
        with torch.npu.stream(two), pytest.raises(RuntimeError, match="must end on the same stream"):
            graph.capture_end()
        one.wait_stream(two)
        graph.capture_end()


def test_a_task_group_that_is_left_open(emulator):
    refused = pytest.raises(RuntimeError, match=r"107033[\s\S]*a task group is not closed")
    with refused, torch.npu.graph(torch.npu.NPUGraph()):
        torch.npu.graph_task_group_begin(torch.npu.current_stream())


def test_what_the_wheel_refuses(emulator):
    """Before the runtime is asked: the default stream, a graph that is one already, a replay of none."""
    graph = torch.npu.NPUGraph()
    with pytest.raises(RuntimeError, match="must be captured on a non-default stream"):
        graph.capture_begin()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()
    with torch.npu.graph(graph):
        torch.ones(4, device="npu")
    with pytest.raises(RuntimeError, match="already owns a captured graph"), torch.npu.stream(torch.npu.Stream()):
        graph.capture_begin()


def test_the_streams_of_all_graphs_are_so_many(processes):
    """What has no room at its begin is refused there; a graph that is gone makes room."""
    (refused,) = processes.run(do.room, ranks=1)
    assert "207008" in refused[0] and "no stream resource: graphs have 2 streams" in refused[0] and len(refused) == 1


@pytest.mark.parametrize("what", ["task queue 2", "streams", "tasks", "outside", "pageable"])
def test_refusals_that_end_a_process(processes, what):
    """By an environment that a process has from its start, or deep in the wheel's host queue, which ends with them."""
    (said,) = processes.run(do.no_capture, ranks=1, what=what)
    wanted = {
        "task queue 2": "Do not support TASK_QUEUE_ENABLE = 2 during NPU graph capture",
        "streams": "no stream resource",
        "tasks": "no stream resource",
        "outside": "dependency created on uncaptured work in another stream",
        "pageable": "Not allow to synchronize captured-stream",
    }
    assert wanted[what] in said
