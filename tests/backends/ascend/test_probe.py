"""The probe: what it says of each release, of a device that does something else, and of one that refuses or dies.

What a release is known to do is from its sources, as far as public: which
parts, sizes and dtypes its tiling takes (attention_update_tiling.cpp,
aclnn_transpose_batch_mat_mul.cpp, scatter_pa_kv_cache_tiling.cpp), and that
8.5.0 takes `active_num` -1 at its word (moe_init_routing_v3_tiling.cpp).
"""

import itertools
import math
import os

import pytest
import torch
from attrs import evolve

from mla_fx.backends.ascend.emulator.releases import NEWEST
from mla_fx.backends.ascend.probe import POINTS, Case, Found, Outcome, Point, Site
from mla_fx.backends.ascend.probe.point import Verdict, each
from mla_fx.backends.ascend.probe.report import lacking, meaning, merged
from mla_fx.backends.ascend.probe.run import run
from mla_fx.backends.captured import Captured
from mla_fx.backends.device import Scratch

SIZES = (64, 128, 192, 512)
CANN = {"8.5": (8, 5), "9.0": (9, 0), "9.1": (9, 1)}


def known(release: str) -> dict[tuple[int, str], Verdict]:
    """What the sources of a release say, for the cases that do not simply hold."""
    found: dict[tuple[int, str], Verdict] = {
        (6, "float32"): "refused",  # fp16, bf16 and int8 only
        (6, "more rows than slots"): "refused",  # rows of slot -1 count
        (9, "NaN rows at weight 0"): "differs",  # nobody promises that they do not count: the emulator lets them
        (14, "kernels of one layer"): "measured",
    }
    found |= {(point.number, case.name): "not run" for point in POINTS[10:12] for case in point.cases}
    if release != "9.1":
        found |= {(15, case.name): "not run" for case in of(15).cases}  # weights stay as they are
        found[16, "product and activation"] = "not run"
        found[4, "17 parts"] = "refused"  # at most 16
        found[5, "128 heads, 512 x 128"] = "refused"  # heads * K = 65536
    if release == "8.5":
        found[7, "active_num -1"] = "differs"  # index and counts look right, no row is copied
        multiples = {(k, n): k % 128 == n % 128 == 0 for k in SIZES for n in SIZES}
        found |= {(5, f"4 heads, {k} x {n}"): "refused" for (k, n), fit in multiples.items() if not fit}
    return found


def asked(site: Site, points: tuple[Point, ...]) -> dict[tuple[int, str], Outcome]:
    return {(found.point, found.case): found.outcome for found in run(site, points)}


def of(number: int) -> Point:
    (found,) = (point for point in POINTS if point.number == number)
    return found


def test_there_are_seventeen_points():
    assert [point.number for point in POINTS] == list(range(1, 18))
    assert all(len({case.name for case in point.cases}) == len(point.cases) for point in POINTS)


def as_known(emulator, release: str, points: tuple[Point, ...]) -> dict[tuple[int, str], Outcome]:
    """And nothing fails that the rules rest on in that release, so none is asked to change."""
    before, numbers = dict(os.environ), [point.number for point in points]
    found = asked(Site(CANN[release], emulator), points)
    assert list(found) == [(point.number, case.name) for point, case in each(points)]
    differing = {key: outcome.verdict for key, outcome in found.items() if outcome.verdict != "holds"}
    assert differing == {key: verdict for key, verdict in known(release).items() if key[0] in numbers}
    refusals = {key: outcome.detail for key, outcome in found.items() if outcome.verdict == "refused"}
    assert all(
        text.startswith("161002: aclnnTranspose" if key[0] == 5 else "561002: aclnn") for key, text in refusals.items()
    )
    said = [Found(*key, outcome) for key, outcome in found.items()]
    assert lacking(points, said, CANN[release]) == []
    for point in points:
        means = meaning(point, [one for one in said if one.point == point.number], CANN[release])
        assert not ("must" in means and point.number not in (7, 9)), means
    assert dict(os.environ) == before
    return found


def test_each_release_does_what_it_is_known_to(emulator, release):
    """Points 13, 14 and 17, in which releases do not differ, on the newest only."""
    alike = (13, 14, 17) if release != NEWEST else ()
    found = as_known(emulator, release, tuple(point for point in POINTS if point.number not in alike))
    if release == NEWEST:
        counted = found[14, "kernels of one layer"].figures
        assert 0 < counted["operators"] <= counted["kernels"] and counted["records and waits"] > 0


@pytest.mark.soak
def test_each_release_does_what_it_is_known_to_in_all_points(emulator, release):
    as_known(emulator, release, POINTS)


# --- a device that does something else ---------------------------------------------------


def _lse_in_bits(*given):
    given[-1].mul_(1 / math.log(2))


def _full_rows_without_keys(*given):
    given[-2][given[-1][:, 0, 0].isinf()] = 1


def _spoilt_by_infinity(lse, parts, update_type, out, merged):
    out[(torch.stack(lse) == math.inf).any(0)] = math.nan


def _spoilt_by_minus_infinity(lse, parts, update_type, out, merged):
    out[(torch.stack(lse) == -math.inf).any(0)] = math.nan


def _lse_off_by_one(lse, parts, update_type, out, merged):
    if update_type == 1:
        merged.add_(1)


def _blind_to_strides(lse, parts, update_type, out, merged):
    if not parts[0].is_contiguous():
        out.mul_(2)


def _at_most_eight(lse, parts, update_type, out, merged):
    if len(parts) > 8:
        out.copy_(sum(part.float() for part in parts) / len(parts))


def _heads_backwards(*given):
    given[-1].copy_(given[-1].flip(1))


def _slots_from_the_end(key, cache, slots, *rest):
    cache[-1, slots[slots < 0].long()[:1]] = key[slots < 0][:1]


def _unsorted(*given):
    rows = given[-4]
    rows[:2] = rows[:2].flip(0)


def _tenth_more(*given):
    (given[-1] if given[-1] is not None else given[-3][0]).mul_(1.1)


def _product_tenth_more(*given):
    given[-3][0].mul_(1.1)


def _last_tenth_more(*given):
    given[-1].mul_(1.1)


def _cast_back_off_by_one(source, out):
    if isinstance(out, torch.Tensor):
        out.add_(1)


def _backwards(*given):
    given[-2].copy_(given[-2].flip(1))


def _nz_product_tenth_more(*given):
    *_, outs = (one for one in given if isinstance(one, list) and one)
    outs[0].mul_(1.1)


def _more_every_time(*given):
    given[-2].mul_(next(CALLS))


def _no_scale_for_zeros(*given):
    given[-2].masked_fill_(given[-2] == 0, math.nan)


CALLS = itertools.count(1)


def _all(number: int) -> set[str]:
    return {case.name for case in of(number).cases}


#: Point, operator, what is done to its results, and the cases that see it.
SPOILT = [
    (1, "FusedInferAttentionScoreV4", _lse_in_bits, {"functional"}),
    (1, "FusedInferAttentionScoreV4", _full_rows_without_keys, {"row without a key"}),
    (2, "FusedInferAttentionScoreV4", _lse_in_bits, _all(2)),
    (3, "FusedInferAttentionScoreV4", _lse_in_bits, _all(3)),
    (4, "AttentionUpdate", _spoilt_by_infinity, {"one +inf"}),
    (4, "AttentionUpdate", _spoilt_by_minus_infinity, {"one -inf", "LSE of the result"}),
    (4, "AttentionUpdate", _lse_off_by_one, {"LSE of the result"}),
    (4, "AttentionUpdate", _blind_to_strides, {"strided"}),
    (4, "AttentionUpdate", _at_most_eight, {"9 parts", "17 parts"}),
    (5, "TransposeBatchMatMul", _heads_backwards, _all(5)),
    (6, "ScatterPaKvCache", _slots_from_the_end, {"bf16, slots of -1", "float32 as pairs of bf16"}),
    (7, "MoeInitRoutingV3", _unsorted, _all(7)),
    (8, "GroupedMatmulV5", _product_tenth_more, _all(8)),
    (9, "MoeTokenUnpermute", _tenth_more, _all(9)),
    (10, "DynamicQuantV2", _no_scale_for_zeros, {"zero row"}),
    (15, "NpuFormatCast", _cast_back_off_by_one, {"cast and back"}),
    (15, "GroupedMatmulWeightNz", _nz_product_tenth_more, {"grouped product"}),
    (15, "QuantMatmulWeightNz", _last_tenth_more, {"product"}),
    (17, "AttentionUpdate", _more_every_time, _all(17)),
    (16, "DequantSwigluQuantV2", _backwards, {"of experts", "of all rows"}),
    (16, "GroupedMatmulSwigluQuantWeightNzV2", _backwards, {"product and activation"}),
]


@pytest.mark.cann("9.1")
@pytest.mark.parametrize(("number", "name", "spoil", "seen"), SPOILT, ids=lambda x: getattr(x, "__name__", None))
def test_what_differs_is_seen(emulator, monkeypatch, number, name, spoil, seen):
    """And asks something of the backend, if it rests on that."""
    operator = emulator._operators[f"aclnn{name}"]

    def wrong(*given):
        operator.run(*given)
        spoil(*given)

    monkeypatch.setitem(emulator._operators, f"aclnn{name}", evolve(operator, run=wrong))
    found = asked(Site((9, 1), emulator), (of(number),))
    usual = {"float32", "more rows than slots"}
    assert {case for (_, case), outcome in found.items() if outcome.verdict == "differs"} == seen
    assert {case for (_, case), outcome in found.items() if outcome.verdict == "refused"} <= usual
    assert all(": must be " in outcome.detail for outcome in found.values() if outcome.verdict == "differs")


def _attention(emulator, monkeypatch, **other) -> dict[str, Verdict]:
    """Point 1 with another operator of attention."""
    name = "aclnnFusedInferAttentionScoreV4"
    monkeypatch.setitem(emulator._operators, name, evolve(emulator._operators[name], **other))
    return {case: outcome.verdict for (_, case), outcome in asked(Site((9, 1), emulator), (of(1),)).items()}


def test_a_workspace_that_grows_with_lengths_is_seen(emulator, monkeypatch):
    """Lengths of keys are the seventh argument."""
    usual = emulator._operators["aclnnFusedInferAttentionScoreV4"].most
    verdicts = _attention(emulator, monkeypatch, most=lambda *given: usual(*given) + 64 * max(given[6]))
    assert [case for case, verdict in verdicts.items() if verdict != "holds"] == ["one workspace for all lengths"]


def test_given_results_that_get_something_else_are_seen(emulator, monkeypatch):
    """The third and fourth call of attention are those of that case, functional and not."""
    usual, calls = emulator._operators["aclnnFusedInferAttentionScoreV4"].run, itertools.count(1)

    def wrong(*given):
        usual(*given)
        if next(calls) == 4:
            given[-2].mul_(1.1)

    verdicts = _attention(emulator, monkeypatch, run=wrong)
    assert [case for case, verdict in verdicts.items() if verdict != "holds"] == ["given results and workspace"]


def test_streams_that_do_not_wait_are_seen(emulator, monkeypatch):
    monkeypatch.setattr(torch.npu.Stream, "wait_event", lambda self, event: None)
    assert asked(Site((9, 1), emulator), (of(13),))[13, "one event again and again"].verdict == "differs"


def test_lengths_that_are_not_updated_are_seen(emulator, monkeypatch):
    """Every replay has those of the first step."""
    usual, first = Captured._update, []

    def stale(self, leaves, caller):
        first.append(leaves)
        usual(self, first[0], caller)

    monkeypatch.setattr(Captured, "_update", stale)
    found = {case: outcome.verdict for (_, case), outcome in asked(Site((9, 1), emulator), (of(17),)).items()}
    assert found == {"other activations": "holds", "other lengths": "differs"}


def test_programs_that_share_no_workspace_are_seen(emulator, monkeypatch):
    held = []

    def always_more(self, need, size):
        held.append(torch.empty(size(), dtype=torch.uint8, device="npu"))
        return held[-1]

    monkeypatch.setattr(Scratch, "room", always_more)
    memory = evolve(of(14), cases=of(14).cases[:1])
    assert asked(Site((9, 1), emulator), (memory,))[14, "memory of ten programs"].verdict == "differs"


@pytest.mark.parametrize("cann", CANN.values(), ids=CANN)
@pytest.mark.parametrize("point", POINTS, ids=lambda point: str(point.number))
def test_whatever_fails_that_the_backend_rests_on_has_a_meaning(cann, point):
    well = [Found(point.number, case.name, Outcome("holds" if case.needs(cann) else "refused")) for case in point.cases]
    fine = meaning(point, well, cann)
    assert lacking([point], well, cann) == []
    for k, case in enumerate(point.cases):
        for verdict in ("differs", "refused", "faults"):
            found = [*well[:k], evolve(well[k], outcome=Outcome(verdict)), *well[k + 1 :]]
            assert lacking([point], found, cann) == ([(point.number, case.name)] if case.needs(cann) else [])
            if case.needs(cann):
                assert meaning(point, found, cann) != fine, (case.name, verdict)


def test_what_the_emulated_releases_refuse_would_be_told_if_it_held():
    """Rules that go out of the way of something say so when they need not."""
    for number, case in (
        (4, "all +inf and -inf"),
        (5, "4 heads, 64 x 64"),
        (6, "float32"),
        (9, "NaN rows at weight 0"),
    ):
        point = of(number)
        by_name = {c.name: Outcome("holds" if c.needs((8, 5)) else "refused") for c in point.cases}
        usual, other = dict(by_name), {**by_name, case: Outcome("holds")}
        if number == 4:
            usual, other = {**by_name, case: Outcome("holds")}, {**by_name, case: Outcome("differs")}
        first, second = ([Found(number, name, what) for name, what in one.items()] for one in (usual, other))
        assert meaning(point, first, (8, 5)) != meaning(point, second, (8, 5))


# --- a device that refuses, and one that dies ---------------------------------------------


def beyond(site: Site) -> Outcome:
    torch.index_select(torch.zeros(3).npu(), 0, torch.tensor([99]).npu())
    return Outcome("holds")


def raises(site: Site) -> Outcome:
    raise RuntimeError("NPU function error: call aclnnX failed, error code is 561002\n[ERROR] when\naclnnX: not so\n")


def holds(site: Site) -> Outcome:
    return Outcome("holds")


def trial(*cases: Case) -> Point:
    return Point(1, "trial", "nothing", cases, lambda found, cann: "fine")


def test_a_refusal_costs_nothing_but_itself(emulator):
    found = asked(Site((9, 1), emulator), (trial(Case("a", raises), Case("b", holds)),))
    assert found[1, "a"] == Outcome("refused", "561002: aclnnX: not so", error=found[1, "a"].error)
    assert "call aclnnX failed" in found[1, "a"].error and found[1, "b"] == Outcome("holds")


def test_behind_a_fault_nothing_is_run(emulator):
    found = asked(Site((9, 1), emulator), (trial(Case("a", holds), Case("b", beyond), Case("c", holds)),))
    assert [outcome.verdict for outcome in found.values()] == ["holds", "faults", "not run"]
    assert "507011" in found[1, "b"].detail
    assert found[1, "c"].detail == "the device has faulted in point 1, b"


def test_a_point_of_which_nothing_ran_means_nothing():
    found = [Found(1, case.name, Outcome("not run", "x")) for case in of(1).cases]
    assert meaning(of(1), found, (9, 1)) == "Nothing is known of it."
    some = [Found(1, of(1).cases[0].name, Outcome("holds")), *found[1:]]
    assert meaning(of(1), some, (9, 1)).endswith("Not all of it has run.")


# --- several ranks ----------------------------------------------------------------------


def test_of_several_ranks_the_worst_is_told():
    ranks = [[Found(1, "a", Outcome("holds")), Found(1, "b", Outcome("holds", "here"))] for _ in range(2)]
    ranks[1][0] = Found(1, "a", Outcome("refused", "not so"))
    assert merged(ranks) == [Found(1, "a", Outcome("refused", "rank 1: not so")), ranks[0][1]]
