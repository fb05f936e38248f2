"""Engines in a group of processes, one for each rank, say what one process says that runs all ranks of the layout."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from transformers import AutoModelForCausalLM

from mla_fx.layout import Layout
from mla_fx.models import Sampling
from mla_fx.models.addition import DIRECTORY
from tests.models import serving
from tests.models.served import oracle, random_prompts, small
from tests.models.serving import Served, together
from tests.models.test_attention_agreement import YARN
from tests.models.test_model_agreement import WIDE, agree, written
from tests.processes import Nursery

#: Models that transformers writes: generation, and what differs from the smallest.
WRITTEN: dict[str, tuple[int, dict[str, Any]]] = {
    "V2-Lite-like": (2, {**WIDE, "topk_method": "greedy", "q_lora_rank": None, "rope_scaling": YARN}),
    "V3-like": (3, {**WIDE, "rope_scaling": YARN, "n_shared_experts": 2}),
    "Kimi-like": (3, {**WIDE, "n_group": 1, "topk_group": 1, "rope_scaling": YARN, "num_experts_per_tok": 3}),
}
WARM = (Sampling(), Sampling(temperature=0.8, top_k=20, seed=5), Sampling(temperature=1.2, repetition_penalty=1.1))


@functools.cache
def checkpoint(name: str) -> Path:
    """A directory of the model called so, for as long as the process lives."""
    if name == "built in":
        return DIRECTORY
    if name == "random":
        return small()
    _KEPT.append(tempfile.TemporaryDirectory())
    written(*WRITTEN[name], _KEPT[-1].name)
    return Path(_KEPT[-1].name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def case(name: str, tp: int, dcp: int, dp: int, **given: Any) -> Served:
    vocabulary = 14 if name == "built in" else 32
    return Served(
        directory=checkpoint(name),
        layout=Layout(tp=tp, dcp=dcp, dp=dp),
        prompts=random_prompts(5, longest=11, vocabulary=vocabulary, seed=tp + dp),
        **given,
    )


def same(processes: Nursery, served: Served, kind: str = "gloo") -> list[list[int]]:
    """Every rank has the texts of one process, and rank 0 the logits of its steps, bit for bit."""
    found = processes.run(serving.texts, ranks=served.layout.size, kind=kind, served=served)
    right, logits = together(served)
    assert [texts for texts, _ in found] == [right] * served.layout.size
    assert len(found[0][1]) == len(logits)
    for ours, theirs in zip(found[0][1], logits, strict=True):
        assert torch.equal(ours, theirs)
    return right


LAYOUTS = [(8, 8, 1), (8, 4, 1), (8, 2, 1), (4, 4, 2), (2, 1, 4), (1, 1, 4), (2, 2, 1), (4, 2, 1)]
MODELS = ["built in", *WRITTEN]
ALWAYS = [("random", 4, 2, 1), ("random", 2, 1, 2)]


@pytest.mark.parametrize(
    ("name", "tp", "dcp", "dp"),
    [*ALWAYS, *(pytest.param(name, *sizes, marks=pytest.mark.soak) for name in MODELS for sizes in LAYOUTS)],
)
def test_texts_are_those_of_one_process(processes, name, tp, dcp, dp):
    served = case(name, tp, dcp, dp)
    found = same(processes, served)
    if name == "random":
        assert found == [oracle(served.directory).greedy(prompt, served.count) for prompt in served.prompts]


@pytest.mark.parametrize(
    ("name", "tp", "dcp"),
    [("V3-like", 2, 2), *(pytest.param(name, 4, 2, marks=pytest.mark.soak) for name in WRITTEN)],
)
def test_every_process_agrees_with_transformers(processes, name, tp, dcp):
    """A prompt in chunks and 16 tokens behind it: text and logits are those of transformers' model, on each rank."""
    served = evolve(case(name, tp, dcp, 1, count=16), prompts=random_prompts(1, longest=30, vocabulary=101, seed=3))
    (prompt,), model = served.prompts, AutoModelForCausalLM.from_pretrained(served.directory)
    assert len(prompt) > served.chunk
    for (text,), logits in processes.run(serving.texts, ranks=tp, kind="gloo", served=served):
        found = torch.cat(logits)
        agree(model, [*prompt, *text[:-1]], found[-16:], first=len(prompt) - 1)
        assert found[-16:].argmax(1).tolist() == text


EVERYTHING: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "drafts, samples, few blocks": ((1, 1, 2), {"drafts": 2, "sampling": WARM, "blocks": 6}),  # some start over
    "drafts": ((4, 4, 1), {"drafts": 2, "count": 20}),
    "short chunks": ((2, 2, 2), {"chunk": 3}),
    "hardly any blocks": ((2, 2, 1), {"blocks": 6, "requests": 3, "count": 12}),
    "8 bits": ((4, 2, 2), {"quantization": "w8a8", "dtype": "bf16", "drafts": 1}),
    "reference": ((2, 1, 2), {"backend": "reference", "sampling": WARM}),
}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.soak) if k else way for k, way in enumerate(EVERYTHING)]
)
def test_whatever_an_engine_does(processes, way):
    """Drafts, samples, chunks shorter than prompts, blocks that run out, 8-bit weights."""
    sizes, given = EVERYTHING[way]
    same(processes, case("random", *sizes, **given))


@pytest.mark.parametrize("drafts", [0, pytest.param(2, marks=pytest.mark.soak)])
def test_tokens_are_decided_once(processes, drafts):
    """Ranks whose logits differ, not by a last bit but wholly, have the texts of the first rank of each replica."""
    served = case("random", 2, 2, 1, drafts=drafts, sampling=WARM)
    found = processes.run(serving.texts, ranks=2, kind="gloo", served=served, off=5.0)
    right, _ = together(served)
    assert [texts for texts, _ in found] == [right] * 2
    first, second = (torch.cat(logits) for _, logits in found)
    assert (first.argmax(1) != second.argmax(1)).float().mean() > 0.5


def test_a_failed_step_is_gone_on_from_in_a_fresh_group(processes):
    """Rank 1 fails in the middle of a step; the others are told, and the texts are those of no failure at all."""
    served = case("random", 2, 1, 1, sampling=WARM, count=12)
    found = processes.run(serving.resumed, ranks=2, served=served, after=9)
    right, _ = together(served)
    assert [texts for texts, _, _ in found] == [right] * 2
    assert "planted" in found[0][1] and "rank 1" in found[0][1] and "planted" in found[1][1]
    assert all(0 < sum(had) < 12 * len(served.prompts) for _, _, had in found)


def test_what_one_replica_refuses_all_refuse(processes):
    """Before anything has run: a token of the second replica that none is, and positions that it has no blocks for."""
    found = processes.run(serving.refusals, ranks=2, served=case("random", 1, 1, 2))
    messages = [
        "tokens of replica 1: each must be in 0..63: got [64]",
        "block_table[0]: must have 1 blocks for history + query = 1 positions (1 ranks of 4 a block): got 0, of at "
        "most M = 64",
    ]
    assert found == [(messages, [1, 1])] * 2  # and the group is as good as before
