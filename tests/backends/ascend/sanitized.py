"""What torch_npu's own stream sanitizer says of programs: for a process of its own, `tests.backends.ascend.ranks`.

The tool traces the whole process from where it is switched on.  It knows
nothing of programs, law or machine: it follows streams, events, the allocator
and every operator that torch dispatches, and names two accesses that no event
orders, and memory that is let go while another stream may use it.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from mla_fx.backends.ascend.emulator import emulate

EMULATOR = emulate(seed=0)  # before torch_npu

import torch  # noqa: E402
from attrs import evolve  # noqa: E402
from torch.cuda import _sanitizer as csan  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402
from torch.utils._python_dispatch import _disable_current_modes  # noqa: E402
from torch_npu.npu import _sanitizer, _stream_check  # noqa: E402

from mla_fx import orchestrations  # noqa: E402
from mla_fx.effects import InputError, Keep, Program, Record, ScheduleError, Wait, check, schedule  # noqa: E402
from tests.backends.ascend.steps import Trial, ascend, setup, streams  # noqa: E402
from tests.backends.test_decode_races import late_write, write_aside  # noqa: E402
from tests.setups import CONFIG, Setup  # noqa: E402

Report = tuple[str, str, str]  # what is missing, and the streams, named, that it is missing between


class Handler(_stream_check.NPURecordStreamHandler):
    """The tool's, which looks at memory when it is let go.

    Nobody can take the memory before the next launch on the stream that it was allocated on, and a program leaves it
    to that launch to be behind all uses.  So what the tool would report is held until there, and then put to the
    tool's own question again: has this stream waited for that one?
    """

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Any] = []
        self.races: list[Any] = []

    def _handle_memory_deallocation(self, data_ptr: int) -> None:
        self.held += self._get_record_stream_errors(data_ptr)
        self._npu_tensors.pop(data_ptr, None)
        super()._handle_memory_deallocation(data_ptr)

    def _handle_kernel_launch(self, stream: int, *launched: Any, **given: Any) -> Any:
        due = [error for error in self.held if error.allocation_stream == stream]
        self.held = [error for error in self.held if error.allocation_stream != stream]
        for error in due:
            used = (error.usage_stream, error.usage.seq_num)
            if not self._is_creation_stream_synced_to_usage(stream, *used):
                self.record_stream_errors.append(error)
        # The tool would raise, and then stumble over the memory that is let go while an exception is on its way.
        self.races += super()._handle_kernel_launch(stream, *launched, **given)
        return []


class NoStack(list[Any]):
    """Where in the code something was done, which nobody asks for here: it is most of what the tool takes."""

    def format(self) -> list[str]:
        return []


def switched_on() -> Handler:
    """The tool, with the handler above in the place of its base."""
    stacks = SimpleNamespace(
        walk_stack=lambda frame: None,
        StackSummary=SimpleNamespace(extract=lambda frames, lookup_lines: NoStack()),
    )
    _stream_check.traceback = csan.traceback = stacks
    _stream_check.NPURecordStreamHandler = Handler
    # Without the compiler, which torch would load to keep it out of this, for every operator.
    mode = _stream_check.NPUSanitizerDispatchMode
    mode.__torch_dispatch__ = mode.__torch_dispatch__.__wrapped__
    _sanitizer.npu_sanitizer.check_record_stream = True
    _sanitizer.enable_npu_sanitizer()
    handler = _sanitizer.npu_sanitizer.event_handler
    assert isinstance(handler, Handler) and _sanitizer.npu_sanitizer.enabled
    return handler


def reports(handler: Handler, program: Program, given: Setup) -> list[Report]:
    """What the tool says of two steps with no wait of the host between: orders and keeps that are missing."""
    backend = ascend(given.ranks)
    handler.races.clear()
    handler.record_stream_errors.clear()
    with _disable_current_modes():  # what is made ready is nobody's race
        trial = Trial(backend, program, given)
        named = streams(backend)
    caches, *rest = trial.given
    try:
        outputs = [trial.run(caches, *rest) for _ in range(2)]
        for leaf in pytree.tree_leaves(outputs):
            leaf.cpu()
    except RuntimeError:  # garbage made the device fault
        if not handler.races:
            raise
        EMULATOR.recover()
    torch.npu.synchronize()
    races = [("order", race.previous_access.stream, race.current_access.stream) for race in handler.races]
    kept = [("keep", error.allocation_stream, error.usage_stream) for error in handler.record_stream_errors]
    return list(dict.fromkeys((what, named[first], named[second]) for what, first, second in races + kept))


def program_of(name: str, ranks: int, mode: Any = "minimal") -> tuple[Program, Setup]:
    """A program of a named orchestration: of one layer's attention, or of a model where it has no use for that."""
    chosen = orchestrations.NAMED[name]
    sizes: dict[str, Any] = {"ranks": ranks, "split": chosen.split}
    if ranks == 3:
        sizes["config"] = evolve(CONFIG, num_attention_heads=6)
    try:
        given = setup("fp32" if ranks == 3 else "bf16", **sizes)
        return schedule(given.step, chosen, mode=mode), given
    except (ScheduleError, InputError):
        given = setup("fp32", layers=2, **sizes)
        return schedule(given.step, chosen, mode=mode), given


def legal() -> Iterator[tuple[str, Program, Setup]]:
    """Named orchestrations for 1 to 4 ranks, and with all kept that crosses streams."""
    for name in orchestrations.NAMED:
        for ranks in (1, 2, 3, 4):
            yield f"{name}, {ranks} ranks", *program_of(name, ranks)
        yield f"{name}, conservative", *program_of(name, 2, "conservative")


def wanting(*names: str) -> Iterator[tuple[str, Program, Setup]]:
    """Named orchestrations for 2 ranks and a program that keeps memory, and each of these without each effect."""
    for name in names:
        if name == "late-write":
            of = setup("fp32")
            program = schedule(late_write(of), write_aside)
            check(program)
        else:
            program, of = program_of(name, 2)
        yield name, program, of
        for index, effect in enumerate(program.effects):
            if isinstance(effect, Keep | Wait | Record):
                yield f"{name} without '{effect}'", program.without(index), of


def told(*names: str) -> dict[str, list[Report]]:
    """What the tool says of programs of these names, whole and wanting, by case; without names, of all legal ones."""
    handler = switched_on()
    cases = wanting(*names) if names else legal()
    return {name: reports(handler, program, given) for name, program, given in cases}
