"""Attention, and a model, against what is installed beside the environment by `make bench-peers`: point by point."""

from collections.abc import Iterator

import pytest
from attrs import evolve

from tests.benchmarks import apart, test_attention, test_model
from tests.benchmarks.table import PAIR, TRANSFORMERS, Point, hold

pytestmark = [
    pytest.mark.bench,
    pytest.mark.skipif(len(apart.installed()) < len(apart.FOLDERS), reason="make bench-peers has not been run"),
]


def without(peer: str, points: Iterator[Point]) -> Iterator[Point]:
    """Points without one of the peers, each at least as long as ours with the others."""
    for point in points:
        peers = {name: function for name, function in point.peers.items() if name != peer}
        yield evolve(point, peers=peers, least=dict.fromkeys(peers, 1.0))


def test_attention_is_as_fast_as_the_fastest_that_is_installed() -> None:
    """torch's own among them; the pair of products has a test of its own: in bf16 it may take minutes here."""
    hold(without(PAIR, test_attention.points(whole=True)), seconds=1)


def test_a_model_decodes_as_fast_as_the_engine_that_is_installed() -> None:
    hold(without(TRANSFORMERS, (point for point in test_model.points() if len(point.peers) > 1)), seconds=1)
