"""The whole model on the emulated Ascend: a step against the reference, text against that of the CPU."""

import itertools
from functools import lru_cache

import pytest
import torch
from attrs import evolve

from mla_fx import Layout, StepShape, backends, orchestrations
from mla_fx.effects import schedule
from mla_fx.models import Checkpoint, Engine, MtpDrafter, Runner, Sampling, sampling
from mla_fx.models.addition import DIRECTORY, problems
from mla_fx.models.tokenizer import Tokenizer
from tests.backends.ascend.steps import Trial, ascend, equal, leaves, setup
from tests.cases import mostly_soak
from tests.models.small_weights import TINY, logits, write_modelslim

CHECKPOINT, TOKENIZER = Checkpoint.open(DIRECTORY), Tokenizer(DIRECTORY)
PROBLEMS = problems(4, seed=1)
#: Of logits, hidden states and caches, all of about size 1; many roundings in a row.
ATOL = {"bf16": 0.12, "fp16": 0.015, "fp32": 1e-5}
#: An activation rounded to 16 bits may fall on the next of its 127 steps.
STEPS = {"bf16": 0.12, "fp16": 0.12, "fp32": 1e-5}

#: Both dtypes and both forms of weights; in long runs each with each.
PAIRS = mostly_soak(itertools.product(["fp32", "bf16"], [None, "w8a8"]), [("fp32", None), ("bf16", "w8a8")])


@pytest.mark.parametrize(
    ("dtype", "quantization", "ranks"),
    [
        *mostly_soak(
            itertools.product(["fp32", "bf16", "fp16"], [None, "w8a8"], [1, 2, 4, 8]),
            [("fp32", None, 4), ("bf16", None, 8), ("fp16", None, 1), ("fp32", "w8a8", 1), ("bf16", "w8a8", 2)],
        ),
        ("fp32", None, Layout(tp=4, dcp=2)),
        ("bf16", None, Layout(tp=2, dcp=1, dp=2)),
        ("fp16", "w8a8", Layout(dp=2)),
    ],
    ids=str,
)
def test_step_against_the_reference(emulator, dtype, quantization, ranks):
    """A dense layer and one with experts; eight ranks have four experts between them, some have none."""
    given = setup(dtype, layers=2, ranks=ranks, quantization=quantization)
    program = schedule(given.step, orchestrations.attention_aside)
    got = leaves(ascend(ranks), program, given)
    want, atol = (
        leaves(backends.get("reference", ranks=ranks), program, given),
        (STEPS if quantization else ATOL)[dtype],
    )
    for ours, exactly in zip(got, want, strict=True):
        torch.testing.assert_close(ours.double(), exactly, rtol=0, atol=atol)
    assert got[0].std() > 0.5  # something is computed
    for rank in range(given.ranks):
        assert torch.equal(got[given.layout.members("tp", rank)[0]], got[rank])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_int8_weights_of_a_checkpoint(emulator, dtype, tmp_path):
    """Kept as ModelSlim wrote them: the same steps and integers as on the CPU, by the 8-bit operators in bf16."""
    attention = evolve(TINY.attention, kv_lora_rank=512, qk_rope_head_dim=64)
    write_modelslim(tmp_path, evolve(TINY, attention=attention))
    with emulator.tracing() as trace:
        got = logits(tmp_path, ascend(2), "w8a8", dtype)
    want = logits(tmp_path, backends.get("cpu", ranks=2), "w8a8", dtype)
    deviation = (got - want).square().mean().sqrt() / want.square().mean().sqrt()
    assert deviation < {"fp32": 1e-4, "bf16": 0.05}[dtype], f"{deviation:.3g}"
    assert (dtype == "bf16") == any("QuantMatmul" in str(task.name) for task in trace)


@pytest.mark.parametrize(("dtype", "quantization"), PAIRS)
def test_step_of_no_tokens(emulator, dtype, quantization):
    given = setup(dtype, layers=2, tokens=0, quantization=quantization)
    got = leaves(ascend(2), schedule(given.step, orchestrations.attention_aside), given, query=(0, 0))
    assert got[0].shape == (0, 19)


@pytest.mark.parametrize(
    ("orchestration", "quantization"),
    mostly_soak(
        itertools.product(["exchange-aside", "attention-aside"], [None, "w8a8"]),
        [("exchange-aside", "w8a8"), ("attention-aside", None)],
    ),
)
def test_orchestrations_and_seeds_give_the_same_bits(emulator, quantization, orchestration):
    """Whatever unwritten rows held: on the emulator that is NaN, or what was there before."""
    given = setup("bf16", layers=2, quantization=quantization)
    expected = leaves(ascend(2), schedule(given.step, orchestrations.serial), given)
    assert not any(leaf.isnan().any() for leaf in expected)
    trial = Trial(ascend(2), schedule(given.step, orchestrations.NAMED[orchestration]), given)
    for seed in range(3):
        emulator.seed(seed)
        assert equal(trial(), expected), f"seed {seed}"


@pytest.mark.parametrize(("dtype", "quantization"), PAIRS)
def test_host_waits_for_nothing(emulator, dtype, quantization):
    """Counts of rows and choices of experts stay on the device: nothing has run when a step has been issued."""
    given, backend = setup(dtype, layers=2, quantization=quantization), ascend(2)
    run = given.compiled(backend, schedule(given.step, orchestrations.attention_aside))
    run(*backend.put(given.arguments(), copy=True))  # makes constants and workspaces
    arguments = backend.put(given.arguments(), copy=True)
    emulator.synchronize()
    with emulator.tracing() as trace:
        run(*arguments)
        assert emulator.ran() == 0
    assert len(trace) > 200


def test_operators_of_a_step(emulator):
    """A step in bf16 goes through the operators for experts and 8 bits, on every rank."""
    given, backend = setup("bf16", layers=2, quantization="w8a8"), ascend(2)
    run = given.compiled(backend, schedule(given.step, orchestrations.serial))
    arguments = backend.put(given.arguments(), copy=True)
    with emulator.tracing() as trace:
        run(*arguments)
    names = [task.name for task in trace]
    assert names.count("aclnnMoeInitRoutingV3") == names.count("aclnnMoeFinalizeRoutingV4") == 2
    assert names.count("aclnnGroupedMatmulV5") == names.count("aclnnSwiGlu") - 2 == 4


def test_int8_weights_are_brought_to_the_device(emulator):
    """From wherever they come: a step finds all of its parameters where it runs."""
    given, backend = setup("fp32", layers=2, quantization="w8a8"), ascend(2)
    prepared = backend.prepare(given.step, given.params())
    assert {leaf.device.type for leaves in prepared.leaves.values() for leaf in leaves} == {"npu"}
    assert torch.int8 in {leaf.dtype for leaves in prepared.leaves.values() for leaf in leaves}


# --- text ---------------------------------------------------------------------------


@lru_cache
def generated(name: str, ranks: int, quantization: str | None, drafts: int) -> tuple[list[list[int]], int]:
    """Tokens of all problems, and how many drafts were accepted; more requests than a step takes, prompts in chunks."""
    shape = StepShape(
        ranks=ranks, requests=3, blocks=12, block_size=4, table_width=8, dtype="fp32", quantization=quantization
    )
    runner = Runner.load(CHECKPOINT, backends.get(name, ranks=ranks), shape=shape, mtp=bool(drafts))
    engine = Engine(
        runner=runner,
        chunk=6,
        end=CHECKPOINT.config.eos_token_id,
        drafter=MtpDrafter(runner, drafts) if drafts else None,
    )
    requests = [engine.add(TOKENIZER.encode(prompt), max_new_tokens=8) for prompt, _ in PROBLEMS]
    list(engine.run())
    return [request.new_tokens for request in requests], sum(request.accepted for request in requests)


@pytest.mark.parametrize(
    ("ranks", "quantization", "drafts"),
    mostly_soak(
        [(1, None, 2), (1, "w8a8", 0), (2, None, 0), (2, "w8a8", 2), (4, None, 2), (8, None, 2)],
        [(1, None, 2), (2, None, 0)],
    ),
)
def test_text_is_that_of_the_cpu(emulator, ranks, quantization, drafts):
    texts, accepted = generated("ascend", ranks, quantization, drafts)
    wanted, taken = generated("cpu", ranks, quantization, drafts)
    assert texts == wanted and accepted == taken and (accepted > 0) == bool(drafts)
    end = CHECKPOINT.config.eos_token_id[0]
    assert [TOKENIZER.decode(text) for text in texts] == [answer for _, answer in PROBLEMS]
    assert all(text[-1] == end for text in texts)


def test_sampling_is_that_of_the_cpu(emulator, monkeypatch):
    """Each request its own, with drafts; probabilities are worked out on the host: on a device, what is asked for in
    float64 comes in float32."""
    given, real = [], sampling.distribution

    def spy(logits: torch.Tensor, *rest) -> torch.Tensor:
        given.append((logits.dtype, logits.device.type))
        return real(logits, *rest)

    def sampled(name: str) -> list[list[int]]:
        shape = StepShape(ranks=1, requests=3, blocks=12, block_size=4, table_width=8, dtype="fp32")
        runner = Runner.load(CHECKPOINT, backends.get(name), shape=shape, mtp=True)
        engine = Engine(runner=runner, chunk=6, drafter=MtpDrafter(runner, 1), tokenizer=TOKENIZER)
        asked = [
            Sampling(temperature=30.0, seed=1),
            Sampling(temperature=5.0, top_k=9, top_p=0.9, min_p=0.01, seed=2),
            Sampling(temperature=30.0, repetition_penalty=1.2, presence_penalty=0.5, seed=3),
        ]
        tokens = TOKENIZER.encode(PROBLEMS[0][0])
        requests = [engine.add(tokens, max_new_tokens=4, sampling=one, top_logprobs=2) for one in asked]
        list(engine.run())
        assert all(len(request.logprobs) == 4 for request in requests)
        return [request.new_tokens for request in requests]

    monkeypatch.setattr(sampling, "distribution", spy)
    texts = sampled("ascend")
    assert set(given) == {(torch.float64, "cpu")}
    assert texts == sampled("cpu") and len(set(map(tuple, texts))) == 3


def test_logits_that_are_not_finite_end_one_request(emulator):
    """One embedding overflows; the other request's text is that of the CPU."""
    shape = StepShape(ranks=2, requests=2, blocks=12, block_size=4, table_width=8, dtype="fp32")
    runner = Runner.load(CHECKPOINT, ascend(2), shape=shape)
    bad = 31
    tables = runner.params.leaves["params.embed_tokens"]
    rank, row = divmod(bad, tables[0].shape[0])
    tables[rank][row] = float("inf")
    engine = Engine(runner=runner, chunk=6, end=CHECKPOINT.config.eos_token_id)
    good = engine.add(TOKENIZER.encode(PROBLEMS[0][0]), max_new_tokens=8)
    broken = engine.add([1, bad, 4], max_new_tokens=8)
    list(engine.run())
    assert good.new_tokens == generated("cpu", 2, None, 0)[0][0]
    assert (broken.finish_reason, broken.new_tokens) == ("error", [])


def test_drafts_do_not_change_the_text(emulator):
    assert generated("ascend", 2, None, 0)[0] == generated("ascend", 1, None, 2)[0]
