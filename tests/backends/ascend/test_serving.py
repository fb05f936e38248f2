"""An engine in processes over the emulated HCCL says what one process says that runs all ranks on its device."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import evolve

from mla_fx.layout import Layout
from mla_fx.models import Sampling, write_checkpoint
from tests.backends.ascend.serving import alone, texts
from tests.cases import mostly_soak
from tests.models.served import SMALL, random_prompts
from tests.models.serving import Served
from tests.processes import Nursery


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """A model whose attention has the sizes that the operators take in 16 bits."""
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 16, "v_head_dim": 16}
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder) / "model", evolve(SMALL, attention=evolve(SMALL.attention, **sizes)), seed=1)
        yield Path(folder) / "model"


CASES = [(2, 2, 1, 0), (1, 1, 2, 1), (4, 4, 1, 0), (4, 2, 1, 1), (2, 1, 2, 1)]


@pytest.mark.parametrize(("tp", "dcp", "dp", "drafts"), mostly_soak(CASES, CASES[:1]))
def test_texts_are_those_of_one_process(processes: Nursery, directory: Path, tp, dcp, dp, drafts) -> None:
    """In bf16, with all logits bit for bit; every rank knows every text."""
    served = Served(
        directory=directory,
        layout=Layout(tp=tp, dcp=dcp, dp=dp),
        prompts=random_prompts(3, longest=9, seed=tp + drafts),
        sampling=(Sampling(), Sampling(temperature=0.9, seed=3)),
        count=4,
        backend="ascend",
        dtype="bf16",
        block_size=16,
        blocks=8,
        drafts=drafts,
    )
    ((right, logits),) = processes.run(alone, ranks=1, served=served)
    found = processes.run(texts, ranks=served.layout.size, served=served)
    assert [mine for mine, _ in found] == [right] * served.layout.size
    assert all(len(text) == 4 for text in right) and len(found[0][1]) == len(logits)
    for ours, theirs in zip(found[0][1], logits, strict=True):
        assert ours.equal(theirs)
