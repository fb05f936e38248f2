"""What a probe found, in words and as JSON: what holds, what does not, and what that means for the backend."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from attrs import asdict, evolve

from mla_fx.backends.ascend.probe.point import About, Cann, Found, Point, Verdict, failing, ran

#: Of several ranks, the worst is told.
_WORST: Final[tuple[Verdict, ...]] = ("faults", "refused", "differs", "not run", "measured", "holds")
#: What Ascend advises for decoding, and what the variable is for.
_ADVISED: Final = {
    "TASK_QUEUE_ENABLE": "1",
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    "HCCL_OP_EXPANSION_MODE": "AIV",
}
#: Releases of CANN whose sources the rules were written by.
_READ: Final[tuple[Cann, ...]] = ((8, 5), (9, 0), (9, 1))


def merged(by_rank: Sequence[Sequence[Found]]) -> list[Found]:
    """One outcome a case, the worst of the ranks; its detail names the rank where they do not agree."""
    found = []
    for of_ranks in zip(*by_rank, strict=True):
        outcomes = [one.outcome for one in of_ranks]
        rank = min(range(len(outcomes)), key=lambda r: _WORST.index(outcomes[r].verdict))
        outcome = outcomes[rank]
        if any(other.verdict != outcome.verdict for other in outcomes):
            outcome = evolve(outcome, detail=f"rank {rank}: {outcome.detail}")
        found.append(evolve(of_ranks[rank], outcome=outcome))
    return found


def heading(about: About) -> Iterator[str]:
    """Versions, environment, and what to know of both."""
    yield ", ".join(f"{name} {value}" for name, value in about.versions.items())
    for name, value in about.environment.items():
        advised = _ADVISED.get(name)
        yield f"  {name}: {value}" + (f" (advised: {advised})" if advised and value != advised else "")
    yield "torch_npu 2.13 names no release of CANN that it goes with; 2.12 goes with 9.1."
    if about.cann not in _READ:
        known = ", ".join(f"{major}.{minor}" for major, minor in _READ)
        yield f"CANN {about.cann[0]}.{about.cann[1]} is not one that the rules were written by: {known}."


def meaning(point: Point, found: Sequence[Found], cann: Cann) -> str:
    """What the outcomes of a point's cases ask of the backend."""
    verdicts = {one.case: one.outcome.verdict for one in found}
    if not ran(verdicts) and not point.group:
        return "Nothing is known of it."
    rest = " Not all of it has run." if "not run" in verdicts.values() and ran(verdicts) else ""
    return point.means(verdicts, cann) + rest


def section(point: Point, found: Sequence[Found], cann: Cann) -> Iterator[str]:
    """A point in lines; cases that the backend rests on and that do not hold are marked."""
    yield f"\n{point.number}. {point.name}: {point.asks}"
    missing = set(lacking([point], found, cann))
    width = max(len(case.name) for case in point.cases)
    for one in found:
        figures = ", ".join(_figure(name, value) for name, value in one.outcome.figures.items())
        said = "; ".join(text for text in (one.outcome.detail, figures) if text)
        mark = "!" if (point.number, one.case) in missing else " "
        yield f" {mark} {one.outcome.verdict:<8}  {one.case:<{width}}  {said}".rstrip()
    yield f"   -> {meaning(point, found, cann)}"


def _figure(name: str, value: float) -> str:
    return f"{name} {value:,}" if isinstance(value, int) else f"{name} off by {value:.1g}"


def lacking(points: Sequence[Point], found: Sequence[Found], cann: Cann) -> list[tuple[int, str]]:
    """Cases that the backend rests on in this release and that do not hold, by number and name."""
    needed = {(point.number, case.name) for point in points for case in point.cases if case.needs(cann)}
    verdicts: Mapping[tuple[int, str], Verdict] = {(one.point, one.case): one.outcome.verdict for one in found}
    return [key for key, verdict in verdicts.items() if key in needed and failing({key[1]: verdict})]


def closing(points: Sequence[Point], found: Sequence[Found], cann: Cann) -> str:
    """The whole in a sentence."""
    counts = {verdict: sum(one.outcome.verdict == verdict for one in found) for verdict in reversed(_WORST)}
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    missing = lacking(points, found, cann)
    named = "; ".join(f"{number}. {case}" for number, case in missing)
    rests = (
        f"what the backend rests on and does not hold: {named}"
        if missing
        else "nothing fails that the backend rests on"
    )
    return f"{told}; {rests}"


def document(points: Sequence[Point], about: About, found: Sequence[Found]) -> dict[str, Any]:
    """The same as plain data."""

    def of(point: Point) -> dict[str, Any]:
        mine = [one for one in found if one.point == point.number]
        needs = {case.name: case.needs(about.cann) for case in point.cases}
        cases = [{"case": one.case, "needed": needs[one.case], **asdict(one.outcome)} for one in mine]
        means = meaning(point, mine, about.cann)
        return {"number": point.number, "name": point.name, "asks": point.asks, "cases": cases, "means": means}

    missing = [{"point": number, "case": case} for number, case in lacking(points, found, about.cann)]
    return {**asdict(about), "points": [of(point) for point in points], "lacking": missing}
