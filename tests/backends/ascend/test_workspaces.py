"""The workspace of both attention operators: one block a rank, in bytes, for all lengths over a program's shapes."""

import pytest
import torch

from mla_fx import backends, orchestrations
from mla_fx.backends import Device
from mla_fx.backends.backend import Backend
from mla_fx.effects import schedule
from mla_fx.effects.ops.history_attention import WORKSPACE
from tests.backends.ascend.legal import LEGAL, there
from tests.backends.ascend.steps import setup
from tests.setups import Setup

ASKED = "_npu_fused_infer_attention_score_v2_get_max_workspace"
LITTLE = {"history": (0, 1), "query": (0, 1)}
FULL = {"history": (93, 90), "query": (1, 2)}


@pytest.fixture
def fresh(emulator) -> Device:
    """A device that no program has run on."""
    return Device("npu", torch.npu)


def backend_on(device: Device, ranks: int) -> Backend:
    whole = backends.get("ascend", ranks=ranks)
    return Backend("ascend", whole.table, whole.world, device)


def step(run, backend: Backend, given: Setup, batch) -> torch.Tensor:
    out, _ = run(*backend.put((given.caches(), given.hidden(), given.batches(**batch)), copy=True))
    return out[0].cpu()


def blocks(device: Device) -> list[int]:
    return [of.memory.nbytes for of in device.scratch.values() if of.memory is not None]


@pytest.mark.parametrize("order", [(LITTLE, FULL), (FULL, LITTLE)], ids=["little first", "full first"])
def test_a_fuller_step_needs_no_larger_one(fresh, order):
    """The operator faults where it is given less than its lengths need."""
    given = setup("bf16")
    backend, exact = backend_on(fresh, 2), backends.get("reference", ranks=2)
    program = schedule(given.step, orchestrations.attention_aside)
    run, right = given.compiled(backend, program), given.compiled(exact, program)
    found = []
    for batch in order:
        want, _ = right(*exact.put((given.caches(), given.hidden(), given.batches(**batch)), copy=True))
        torch.testing.assert_close(step(run, backend, given, batch).double(), want[0], rtol=0, atol=0.06)
        found.append(blocks(fresh))
    assert found[0] == found[1] and len(found[0]) == 2  # one a rank


def test_it_is_asked_for_by_shapes_alone(fresh, monkeypatch):
    """What is asked when a program runs first is the same whatever the lengths of that step are."""
    given, asked = setup("bf16"), []
    real = getattr(torch.ops.npu, ASKED)

    def spy(*tensors, **named):
        lengths = (named["actual_seq_qlen"], named["actual_seq_kvlen"])
        asked[-1].append((*lengths, tuple(tensors[0].shape)))
        return real(*tensors, **named)

    monkeypatch.setattr(torch.ops.npu, ASKED, spy)
    for batch in (LITTLE, FULL):
        asked.append([])
        fresh.scratch.clear()
        backend = backend_on(fresh, 2)
        step(given.compiled(backend, schedule(given.step, orchestrations.attention_aside)), backend, given, batch)
    every, own = (3, 8, 512), (3, 4, 512)
    history, current = ([1, 3], [96, 96], every), ([1, 3], [1, 3], own)
    assert asked[0] == asked[1] == [history, history, current, current]


def test_all_programs_of_a_rank_share_the_largest(fresh):
    """Of every orchestration and number of tokens, on one device; a rank of another world has the same one."""
    needed = []
    for ranks, tokens, name in (
        (2, 3, "attention-aside"),
        (2, 3, "serial"),
        (2, 9, "serial"),
        (1, 3, "exchange-aside"),
    ):
        given, backend = setup("bf16", ranks=ranks, tokens=tokens), backend_on(fresh, ranks)
        run = given.compiled(backend, schedule(given.step, orchestrations.NAMED[name]))
        step(run, backend, given, FULL)
        needed.append(blocks(fresh))
    assert set(fresh.scratch) == {(0, WORKSPACE), (1, WORKSPACE)}
    assert needed[0] == needed[1] < needed[2] == needed[3] and len(needed[2]) == 2
    # In bytes: nine tokens' queries of 8 heads in bf16, and the notes of all of them on 96 keys.
    assert needed[2] == [9 * 8 * (512 + 64) * 2 + 8 * 8 * 9] * 2


VERSIONS = {
    "fia": ("npu_fused_infer_attention_score", "actual_seq_lengths", "actual_seq_lengths_kv"),
    "fia_v2": ("npu_fused_infer_attention_score_v2", "actual_seq_qlen", "actual_seq_kvlen"),
}


@pytest.mark.parametrize("call", VERSIONS)
@pytest.mark.parametrize("paged", [True, False], ids=["paged", "not paged"])
def test_the_most_is_enough_for_any_lengths_and_no_more_than_that(emulator, call, paged):
    """Of both versions of the operator: asked with short lengths, it holds for the longest over the same shapes."""
    name, queries, keys = VERSIONS[call]
    given = LEGAL[call]()
    short, long = ([1, 4], [0, 1]), ([4, 4], [512, 512])
    if not paged:
        given |= {"block_table": None, "block_size": 0, "key": there(4, 1, 512), "key_rope": there(4, 1, 64)}
        short, long = ([1, 4], [1, 4]), ([4, 4], [4, 4])
    tensors = given.pop("query"), given["key"], given.pop("key")
    asked = getattr(torch.ops.npu, f"_{name}_get_max_workspace")
    most = asked(*tensors, **given | {queries: short[0], keys: short[1]}).numel()
    assert most == asked(*tensors, **given | {queries: long[0], keys: long[1]}).numel()

    def run(size: int) -> None:
        room = torch.empty(size, dtype=torch.uint8, device="npu")
        results = [there(4, 16, 512), there(4, 16, 1, dtype=torch.float32)]
        long_ones = {queries: long[0], keys: long[1]}
        getattr(torch.ops.npu, name).out(*tensors, **given | long_ones, workspace=room, out=results)
        emulator.synchronize()

    run(most)
    with pytest.raises(RuntimeError, match=f"workspace: must have {most} bytes: got {most - 1}"):
        run(most - 1)
