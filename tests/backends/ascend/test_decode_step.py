"""The decode step on the emulated Ascend, held against the reference: ranks, dtypes, orchestrations, lengths."""

import itertools

import pytest
import torch

from mla_fx import backends, orchestrations
from mla_fx.backends import RunError, device
from mla_fx.effects import InputError, LawError, Wait, ops, schedule
from tests.backends.ascend.steps import Trial, ascend, equal, leaves, setup
from tests.cases import mostly_soak
from tests.setups import ANYWHERE, Setup

pytestmark = pytest.mark.usefixtures("emulator")
#: Several roundings in a row, each relative to values of size 1.
ATOL = {"bf16": 0.06, "fp16": 0.008, "fp32": 2e-5}


def verify(given: Setup, orchestration: str, **batch) -> None:
    program = schedule(given.step, orchestrations.NAMED[orchestration])
    got = leaves(ascend(given.ranks), program, given, **batch)
    want = leaves(backends.get("reference", ranks=given.ranks), program, given, **batch)
    for ours, exactly in zip(got, want, strict=True):
        torch.testing.assert_close(ours.double(), exactly, rtol=0, atol=ATOL[given.dtype])
    for rank in range(1, given.ranks):
        assert torch.equal(got[0], got[rank])


#: Every dtype under every orchestration, and every number of ranks.
OFTEN = [
    *itertools.product(["bf16", "fp16", "fp32"], ANYWHERE, [2]),
    *[("bf16", "attention-aside", 1), ("fp16", "exchange-aside", 4), ("fp32", "attention-aside", 8)],
]


@pytest.mark.parametrize(
    ("dtype", "orchestration", "ranks"),
    mostly_soak(itertools.product(["bf16", "fp16", "fp32"], ANYWHERE, [1, 2, 4, 8]), OFTEN),
)
def test_against_the_reference(dtype, orchestration, ranks):
    verify(setup(dtype, ranks=ranks), orchestration)


@pytest.mark.parametrize("sizes", [{"ranks": 4}, {"layers": 2, "quantization": "w8a8"}], ids=["layer", "stack, W8A8"])
def test_on_each_release(emulator, release, sizes):
    """In bf16, with attention and the merge by the second version's operator alone."""
    given = setup("bf16", **sizes)
    program = schedule(given.step, orchestrations.attention_aside)
    with emulator.tracing() as trace:
        got = leaves(ascend(given.ranks), program, given)
    want = leaves(backends.get("reference", ranks=given.ranks), program, given)
    for ours, exactly in zip(got, want, strict=True):
        torch.testing.assert_close(ours.double(), exactly, rtol=0, atol=0.12 if given.layers else ATOL["bf16"])
    attention = {task.name for task in trace if "Attention" in task.name}
    assert attention == {"aclnnFusedInferAttentionScoreV4", "aclnnAttentionUpdate"}


LENGTHS = [((0, 0), (1, 2)), ((1, 0), (0, 3)), ((9, 5), (0, 0)), ((23, 2), (3, 0))]


@pytest.mark.parametrize(
    ("dtype", "history", "query"),
    mostly_soak(
        [(dtype, *lengths) for dtype in ("bf16", "fp32") for lengths in LENGTHS],
        [(dtype, *lengths) for dtype, lengths in zip(("bf16", "fp32", "fp32", "bf16"), LENGTHS, strict=True)],
    ),
    ids=str,
)
def test_lengths(dtype, history, query):
    verify(setup(dtype, ranks=4), "attention-aside", history=history, query=query)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_step_of_no_tokens(dtype):
    """T = 0: every rank takes part in the exchange of nothing."""
    given = setup(dtype, tokens=0)
    program = schedule(given.step, orchestrations.attention_aside)
    got = leaves(ascend(2), program, given, query=(0, 0))
    assert got[0].shape == (0, given.config.hidden_size)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_replicated_query(dtype):
    verify(setup(dtype, ranks=4, replicate_query=True), "attention-aside")


@pytest.mark.parametrize(
    ("layers", "dtype"), mostly_soak(itertools.product([1, 3], ["bf16", "fp32"]), [(1, "fp32"), (3, "bf16")])
)
def test_whole_model_of_dense_layers(dtype, layers):
    """From tokens to logits."""
    verify(setup(dtype, layers=layers), "attention-aside")


@pytest.mark.parametrize("orchestration", ["exchange-aside", "attention-aside"])
def test_orchestrations_give_the_same_bits(orchestration):
    given = setup("bf16", ranks=4)
    serial = leaves(ascend(4), schedule(given.step, orchestrations.serial), given)
    assert equal(leaves(ascend(4), schedule(given.step, orchestrations.NAMED[orchestration]), given), serial)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_one_program_serves_many_steps(dtype):
    """Nothing is read on the host in between; the caches grow over block borders, in place."""
    given = setup(dtype)
    program = schedule(given.step, orchestrations.attention_aside)
    device, exact = ascend(2), backends.get("reference", ranks=2)
    run, right = given.compiled(device, program), given.compiled(exact, program)
    hidden = device.put(given.hidden())
    caches, expected = device.put(given.caches(), copy=True), exact.put(given.caches(), copy=True)
    mine, outs, wanted, lengths = caches[0].latent, [], [], [0, 0]
    for step in range(9):
        query = ((1, 2), (3, 0), (0, 1))[step % 3]
        batches = given.batches(tuple(lengths), query)
        out, caches = run(caches, hidden, batches)
        want, expected = right(*exact.put((expected, given.hidden(), batches)))
        outs.append(out[0])
        wanted.append(want[0])
        lengths = [length + new for length, new in zip(lengths, query, strict=True)]
    assert caches[0].latent is mine
    for got, want in zip(outs, wanted, strict=True):
        torch.testing.assert_close(got.cpu().double(), want, rtol=0, atol=ATOL[dtype])


def test_outputs_are_read_on_the_stream_of_the_caller():
    """Whichever that is, and it is current again afterwards."""
    given = setup("fp32")
    program = schedule(given.step, orchestrations.attention_aside)
    expected = leaves(ascend(2), program, given)
    run = given.compiled(ascend(2), program)
    mine = torch.npu.Stream()
    mine.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(mine):
        out, _ = run(*ascend(2).put(given.arguments(), copy=True))
        assert torch.npu.current_stream() == mine
        doubled = out[0] + out[0]
        del out
        again, _ = run(*ascend(2).put(given.arguments(), copy=True))
        assert torch.equal(doubled.cpu(), 2 * expected[0])
        assert torch.equal(again[0].cpu(), expected[0])


def test_inputs_may_still_be_in_the_making(emulator):
    """On the stream of the caller, late, while the call is issued."""
    given = setup("fp32")
    run = given.compiled(ascend(2), schedule(given.step, orchestrations.attention_aside))
    caches, hidden, batches = ascend(2).put(given.arguments(), copy=True)
    expected = leaves(ascend(2), schedule(given.step, orchestrations.serial), given)
    for seed in range(12):
        emulator.seed(seed)
        fresh = [type(cache)(*(part.clone() for part in cache)) for cache in caches]
        out, _ = run(fresh, [x + 0 for x in hidden], batches)
        assert torch.equal(out[0].cpu(), expected[0]), f"seed {seed}"


def test_an_output_may_be_let_go_while_it_is_read(emulator):
    """A next step, called from another stream, must not take its memory before the reader is through."""
    given = setup("fp32")
    run = given.compiled(ascend(2), schedule(given.step, orchestrations.serial))
    caches, hidden, batches = ascend(2).put(given.arguments(), copy=True)
    expected = leaves(ascend(2), schedule(given.step, orchestrations.serial), given)
    readers = torch.npu.Stream(), torch.npu.Stream()
    for seed in range(8):
        emulator.seed(seed)
        fresh = [type(cache)(*(part.clone() for part in cache)) for cache in caches]
        torch.npu.synchronize()
        with torch.npu.stream(readers[0]):
            out, _ = run(fresh, hidden, batches)
            read = out[0] + 0
            del out
        with torch.npu.stream(readers[1]):
            run(fresh, [-x for x in hidden], batches)
        torch.npu.synchronize()
        assert torch.equal(read.cpu(), expected[0]), f"seed {seed}"


def test_illegal_programs_are_refused():
    program = schedule(setup("fp32").step, orchestrations.attention_aside)
    at = next(k for k, effect in enumerate(program.effects) if isinstance(effect, Wait))
    with pytest.raises(LawError, match="missing order"):
        setup("fp32").compiled(ascend(2), program.without(at))


def test_tensors_elsewhere_are_refused():
    given = setup("fp32")
    run = given.compiled(ascend(2), schedule(given.step, orchestrations.serial))
    caches, hidden, batches = given.arguments()
    with pytest.raises(InputError, match=r"of rank 0: must be on npu, as Backend.put moves it: got cpu"):
        run(caches, hidden, batches)
    there = [batch._replace(slots=batch.slots.npu()) for batch in batches]
    with pytest.raises(InputError, match=r"batch.slots of rank 0: is checked by value .* on the host: got npu:0"):
        run(*ascend(2).put((caches, hidden)), there)


def test_a_rule_that_fails_leaves_the_device_usable():
    """In the middle of a step, on the side stream: the error says where, and the next step is right."""
    given = setup("bf16")
    program, backend = schedule(given.step, orchestrations.attention_aside), ascend(2)
    expected = leaves(backend, program, given)
    real, calls, here = backend.table.rules[ops.CurrentAttention], [], torch.npu.current_stream()

    def fails_once(*operands, run, **parameters):
        calls.append(torch.npu.current_stream().npu_stream)
        if len(calls) == 2:
            raise ValueError("no")
        return real(*operands, run=run, **parameters)

    trial = Trial(backend.with_rules({ops.CurrentAttention: fails_once}), program, given)
    with pytest.raises(RunError, match=r"cur, cur_lse = current_attention .*on stream side, rank 1: ValueError: no"):
        trial()
    assert torch.npu.current_stream() == here
    assert equal(trial(), expected) and equal(trial(), expected)
    assert set(calls) == {backend.device.streams["side"].npu_stream}


def test_what_an_operator_refuses_is_not_compiled():
    small = Setup(dtype="bf16")
    program = schedule(small.step, orchestrations.attention_aside)
    with pytest.raises(InputError, match=r"history_attention: L: attention on ascend in bf16 needs 512 .*: got 16"):
        small.compiled(ascend(2), program)


def test_streams_are_the_devices(emulator):
    """One set for all ranks and executables; main is the caller's."""
    given = [setup("fp32", ranks=ranks) for ranks in (4, 2)]
    used = set()
    for one in given:
        backend = ascend(one.ranks)
        trial = Trial(backend, schedule(one.step, orchestrations.attention_aside), one)
        trial()
        with emulator.tracing() as trace:
            trial()
        used |= {task.stream for task in trace if task.stream}
    assert used == {torch.npu.current_stream().npu_stream, device("npu").streams["side"].npu_stream}
