"""Ask a device the cases of a probe, one after the other, and go on after what it refuses.

After each case a sum that is known tells whether the device still works.  A
fault of an NPU stays with the process, so that there the rest is not run;
`apart` goes on in another process.
"""

import re
from collections.abc import Callable, Iterator, Sequence

import torch

from mla_fx.backends.ascend.probe.group import everywhere
from mla_fx.backends.ascend.probe.point import Case, Found, Outcome, Point, Site, each

_CODE = re.compile(r"error code(?: is|:)\s*(\d+)")
_NOISE = re.compile(r"\s*(\[ERROR\]|\[W|\[Error\]|Traceback|TraceBack|File |Rectify|Possible|Solution)")


def run(
    site: Site, points: Sequence[Point], *, start: int = 0, begun: Callable[[int], None] | None = None
) -> Iterator[Found]:
    """Every case from number `start` on; `begun` hears the number of each before it runs."""
    dead = ""
    for number, (point, case) in enumerate(each(points)):
        if number < start:
            continue
        if begun is not None:
            begun(number)
        if why := (_of_group(site, dead) if point.group else dead):
            yield Found(point.number, case.name, Outcome("not run", why))
            continue
        outcome = attempt(site, case)
        if why := fault():
            dead = f"the device has faulted in point {point.number}, {case.name}"
            outcome = Outcome("faults", why if outcome.verdict != "refused" else outcome.detail, error=outcome.error)
        yield Found(point.number, case.name, outcome)


def _of_group(site: Site, dead: str) -> str:
    """Why a group cannot be asked: none may go into a collective that another does not come to."""
    mine = dead or ("" if site.group else site.alone)
    for rank, why in enumerate(everywhere(site, mine)):
        if why:
            return why if site.host is None else f"rank {rank}: {why}"
    return ""


def attempt(site: Site, case: Case) -> Outcome:
    """The outcome of a case; whatever it raises is a refusal."""
    try:
        outcome = case.run(site)
        torch.get_device_module("npu").synchronize()
        return outcome
    except Exception as error:
        return Outcome("refused", brief(error), error=str(error))


def fault() -> str:
    """Why the device does not work any more; empty where it does."""
    try:
        torch.get_device_module("npu").synchronize()
        total = (torch.ones(4, device="npu") + 1).sum().item()
    except Exception as error:
        return brief(error)
    return "" if total == 8 else f"1 + 1, four times, must be 8: got {total}"


def brief(error: Exception) -> str:
    """One line of what CANN says in many: the status, and the last line that says something."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip() and not _NOISE.match(line)]
    line = lines[-1][:200] if lines else type(error).__name__
    code = _CODE.search(text)
    return f"{code[1]}: {line}" if code and code[1] not in line else line
