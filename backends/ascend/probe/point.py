"""What a probe consists of: points, their cases, and what comes of a case.  All of it is values but for two functions.

A case runs one thing on the device and says what came of it against the host;
what it raises is the device's refusal.  `needs` says whether the backend, as it
is, rests on the case in a release of CANN; a point's `means` says in words what
the outcomes of its cases ask of the backend.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, get_args

from attrs import field, frozen
from attrs.validators import in_

#: Major and minor number of a release of CANN.
Cann = tuple[int, int]
#: `holds`: as the host says, or as the sources of CANN say where the case names them.  `differs`: something else came
#: out.  `refused`: the call raised, and the device went on.  `faults`: the device, or the process, did not go on.
#: `measured`: a figure that is neither right nor wrong.
Verdict = Literal["holds", "differs", "refused", "faults", "measured", "not run"]
VERDICTS: Final[tuple[Verdict, ...]] = get_args(Verdict)


@frozen
class Outcome:
    """What came of a case: `detail` in a line, `figures` by name, for a refusal the whole `error`."""

    verdict: Verdict = field(validator=in_(VERDICTS))
    detail: str = ""
    figures: Mapping[str, float] = field(factory=dict)
    error: str = ""


@frozen(eq=False)
class Site:
    """Where a probe runs: a release of CANN, emulated or not, and a group of processes where there are several.

    `group` moves tensors of the device, `host` moves objects between the hosts; both of `torch.distributed`.  Without
    a group, `alone` says why.
    """

    cann: Cann
    emulator: Any = None
    group: Any = None
    host: Any = None
    alone: str = "needs several processes: torchrun --nproc-per-node N -m mla_fx probe"
    rank: int = 0
    ranks: int = 1


def always(cann: Cann) -> bool:
    """In every release."""
    return True


def never(cann: Cann) -> bool:
    """In none: the backend does without."""
    return False


@frozen
class Case:
    """One question to the device."""

    name: str
    run: Callable[[Site], Outcome]
    needs: Callable[[Cann], bool] = always


#: The verdicts of a point's cases by name.
Verdicts = Mapping[str, Verdict]


@frozen
class Point:
    """What is asked under one number; `group`: by several processes together."""

    number: int
    name: str
    asks: str
    cases: tuple[Case, ...]
    means: Callable[[Verdicts, Cann], str]
    group: bool = False


def each(points: Sequence[Point]) -> list[tuple[Point, Case]]:
    """All cases with their points, in order."""
    return [(point, case) for point in points for case in point.cases]


def failing(found: Verdicts, names: Sequence[str] | None = None) -> list[str]:
    """Of the cases that ran, those that do not hold; `names`: among these."""
    bad = ("differs", "refused", "faults")
    return [name for name, verdict in found.items() if verdict in bad and (names is None or name in names)]


def ran(found: Verdicts) -> bool:
    """Whether any case ran."""
    return any(verdict != "not run" for verdict in found.values())


@frozen
class Found:
    """What came of a case, by the number of its point and its name."""

    point: int
    case: str
    outcome: Outcome


@frozen
class About:
    """What was asked: versions and the device in words, environment variables, and the release of CANN in numbers."""

    versions: Mapping[str, str]
    environment: Mapping[str, str]
    cann: Cann
