"""`mla-fx decode --report`: what was moved and held, and that a difference from a formula would be told."""

import re

import pytest

from mla_fx import StepShape
from mla_fx.backends import meter
from mla_fx.cli import main
from mla_fx.cli_report import Rank, lines
from mla_fx.models import small_config
from mla_fx.models.plan import Plan

QUICK = ("decode", "--report", "--no-reference", "--steps", "3", "--prompt", "5", "--dtype", "fp32")


def report(capsys, *options: str) -> str:
    assert main([*QUICK, *options]) == 0
    out: str = capsys.readouterr().out
    return out[out.index("moved, over all steps") :]


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--ranks", "8", "--quantization", "w8a8"),
        ("--ranks", "1"),
        ("--orchestration", "dual-batch", "--new-tokens", "2"),
        ("--replicate-query", "--project-before-merge"),
        ("--backend", "reference", "--ranks", "4"),
    ],
    ids=" ".join,
)
def test_all_is_as_formulas_and_plan_say(capsys, options):
    said = report(capsys, *options)
    assert "where" not in said
    assert re.search(r", weights: [\d,]+, as planned\n", said) and re.search(r", cache: [\d,]+, as planned\n", said)
    assert re.search(r", values of a step at most: [\d,]+, as priced\n", said)
    assert all(line.endswith("as the formula says") for line in said.split("held, in bytes")[0].splitlines()[1:])


def test_bytes_by_hand(capsys):
    """Two prompts of 5 tokens are filled in on their own, in steps of 8 rows; then 3 steps of 2 tokens.

    L = 32, R = 8, H = 8 and N = 4 of float32; what is for the other rank is half of what is exchanged.
    """
    said = report(capsys)
    tokens = 2 * 8 + 3 * 2
    gathered, exchanged = tokens * 4 * (32 + 8) * 4, tokens * 8 * (32 + 1) * 4 // 2
    layers = "  each of ranks 0 to 1, each of layers.0 to layers.2, "
    assert f"{layers}gather_heads over dcp[2]: 5 messages, {gathered:,} bytes, as the formula says\n" in said
    assert f"{layers}all_to_all over dcp[2]: 5 messages, {exchanged:,} bytes, as the formula says\n" in said
    assert f"{layers}all_reduce over tp[2]: 10 messages, " in said
    assert "  each of ranks 0 to 1, outside of layers, all_gather over tp[2]: 5 messages, " in said


def test_what_is_not_as_priced_is_told(capsys, monkeypatch):
    plain = meter._to_others
    monkeypatch.setattr(meter, "_to_others", lambda how, sent, ranks, mine: plain(how, sent, ranks, mine) + (mine == 1))
    said = report(capsys)
    assert re.search(r"  rank 0, layers\.0|  rank 0, each of layers", said) and "  rank 1, " in said
    assert re.search(r"rank 1, .* bytes, where the formula says 5 and [\d,]+\n", said)
    assert not re.search(r"rank 0, .* where", said)


def test_a_hostile_machine_is_refused(capsys):
    assert main([*QUICK, "--adversary", "7"]) == 2
    assert "adversary: a hostile machine cannot be metered: got seed 7" in capsys.readouterr().err


def test_rows_of_experts_are_those_that_were_chosen(capsys):
    """Replicas send what their gates say; the formula says how much that is at most."""
    said = report(capsys, "--layout", "tp=1,dp=2")
    found = re.findall(
        r"rank (\d), .*dispatch_tokens over ep\[2\]: 5 messages, ([\d,]+) bytes, of at most ([\d,]+) by", said
    )
    assert {rank for rank, _, _ in found} == {"0", "1"}
    sizes = [[int(size.replace(",", "")) for size in of] for _, *of in found]
    assert all(5 * 8 < sent <= most for sent, most in sizes) and "where" not in said


def test_what_is_not_as_planned_is_told():
    plan = Plan(config=small_config(), shape=StepShape(ranks=2, requests=1), context=1)
    weights = sum(plan.weights.values())
    fine = {"moved": {}, "forms": 0, "cache": plan.cache, "values": 8, "values_priced": 8, "workspace": 0}
    ranks = [Rank(number=0, weights=weights, **fine), Rank(number=1, weights=weights + 1, **fine)]
    said = [*lines(ranks, plan)]
    assert f"  rank 0, weights: {weights:,}, as planned" in said
    assert f"  rank 1, weights: {weights + 1:,}, where {weights:,} are planned" in said
    assert "  rank 1, values of a step at most: 8, as priced" in said
