"""Bad input is refused before anything runs.

The error names the field, the rule and the value; caches stay as they were.
"""

import numpy as np
import pytest
import torch
from attrs import evolve

from mla_fx import backends, orchestrations
from mla_fx.effects import InputError, Program, schedule
from tests.setups import Setup

SETUP = Setup()
PROGRAM = schedule(SETUP.step, orchestrations.attention_aside)


def with_batch(**changes):
    def change(caches, hidden, batches):
        return caches, hidden, [batches[0], batches[1]._replace(**changes)]

    return change


def table(row: int, column: int, block: int) -> torch.Tensor:
    found = SETUP.batches()[1].block_table.clone()
    found[row, column] = block
    return found


def slots(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def with_cache(make):
    def change(caches, hidden, batches):
        return [caches[0], caches[1]._replace(latent=make(caches[1].latent))], hidden, batches

    return change


def with_hidden(x):
    return lambda caches, hidden, batches: (caches, [hidden[0], x], batches)


def overlapping_ranks(caches, hidden, batches):
    big = torch.zeros(16, 4, 16)
    return [caches[0]._replace(latent=big[:12]), caches[1]._replace(latent=big[4:])], hidden, batches


def rope_inside(caches, hidden, batches):
    inside = caches[1].latent.view(-1)[-caches[1].rope.numel() :].view(caches[1].rope.shape)
    return [caches[0], caches[1]._replace(rope=inside)], hidden, batches


def hidden_inside(caches, hidden, batches):
    return caches, [hidden[0], caches[0].latent.view(-1)[40 : 40 + 72].view(3, 24)], batches


LENGTHS = "batch.history_lengths of rank 1: must be a tuple of 2 integers"

ROWS = {
    "block id beyond the cache": (
        with_batch(block_table=table(1, 0, 12)),
        r"rank 1, history_attention: block_table\[1, 0\]: must be in 0..11, since history_lengths\[1\] is 2: got 12",
    ),
    "block id below 0": (with_batch(block_table=table(0, 0, -1)), r"block_table\[0, 0\]: must be in 0..11, .*: got -1"),
    "history longer than the table": (
        with_batch(history_lengths=(25, 0)),
        r"history_lengths: each must be in 0..24 \(6 columns of block_table, 4 a block\): got \(25, 0\)",
    ),
    "negative history": (with_batch(history_lengths=(-1, 0)), r"history_lengths: each must be in .*: got \(-1, 0\)"),
    "more new tokens than T": (
        with_batch(query_lengths=(2, 2)),
        r"query_lengths: the sum must be at most T = 3 tokens: got 4, from \(2, 2\)",
    ),
    "negative query length": (
        with_batch(query_lengths=(2, -1)),
        r"query_lengths: each must be at least 0: got \(2, -1\)",
    ),
    "slot beyond the cache": (
        with_batch(slots=slots(-1, 48, 0)),
        r"rank 1, write_rows: slots: each must be -1 or in 0..47 \(12 blocks of 4\): got 48",
    ),
    "slot below -1": (with_batch(slots=slots(-2, 1, 0)), r"slots: each must be -1 or in 0..47 .*: got -2"),
    "one slot twice": (with_batch(slots=slots(5, -1, 5)), r"slots: no two tokens may have one slot: got \[5, 5\]"),
    "lengths in a list": (
        with_batch(query_lengths=[1, 2]),
        r"batch.query_lengths of rank 1: must be a tuple of 2 integers: got \[1, 2\]",
    ),
    "too few lengths": (
        with_batch(history_lengths=(1,)),
        r"batch.history_lengths of rank 1: must be a tuple of 2 integers: got \(1,\)",
    ),
    "slots in int32": (
        with_batch(slots=slots(-1, -1, -1).int()),
        r"batch.slots of rank 1: must have dtype int64: got int32",
    ),
    "cache in another dtype": (
        with_cache(lambda t: t.to(torch.bfloat16)),
        r"cache.latent of rank 1: must have dtype fp32: got bf16",
    ),
    "cache of another size": (
        with_cache(lambda t: t[:, :3].contiguous()),
        r"cache.latent of rank 1: must have shape \(12, 4, 16\): got \(12, 3, 16\)",
    ),
    "strided cache": (
        with_cache(lambda t: torch.cat([t, t], dim=-1)[..., :16]),
        r"cache.latent of rank 1: is updated in place and must be contiguous: got strides",
    ),
    "no tensor": (with_hidden([1.0]), r"hidden of rank 1: must be a tensor fp32\[3, 24\]: got list"),
    "hidden in a dtype nobody has": (
        with_hidden(torch.zeros(3, 24, dtype=torch.complex64)),
        r"hidden of rank 1: must have dtype fp32: got complex64",
    ),
    "one rank too few": (
        lambda caches, hidden, batches: (caches, hidden[:1], batches),
        r"hidden: must be a sequence with one entry for each of 2 ranks: got list of 1",
    ),
    "one cache for two ranks": (
        lambda caches, hidden, batches: ([caches[0]] * 2, hidden, batches),
        r"cache.latent of rank 0: is updated in place and must have memory of its own: "
        r"got memory that cache.latent of rank 1 lies in too",
    ),
    "overlapping caches of two ranks": (
        overlapping_ranks,
        r"cache.latent of rank 0: .* cache.latent of rank 1 lies in",
    ),
    "a cache of rotations inside that of latents": (
        rope_inside,
        r"cache.latent of rank 1: is updated in place and must have memory of its own: .* cache.rope of rank 1 lies in",
    ),
    "hidden states inside a cache": (
        hidden_inside,
        r"cache.latent of rank 0: .* got memory that hidden of rank 1 lies",
    ),
    "a cache on another device": (
        with_cache(lambda t: t.to("meta")),
        r"cache.latent of rank 1: must be on cpu, as Backend.put moves it: got meta",
    ),
    "a sparse tensor": (
        with_hidden(torch.zeros(3, 24).to_sparse()),
        r"hidden of rank 1: must be a plain tensor, .*: got torch.sparse_coo",
    ),
    "lengths in floats": (with_batch(history_lengths=(4.0, 2.0)), rf"{LENGTHS}: got \(4.0, 2.0\)"),
    "lengths of NumPy": (with_batch(history_lengths=(np.int64(4), 2)), rf"{LENGTHS}: got \(.*4.*, 2\)"),
    "lengths that are bools": (with_batch(history_lengths=(True, 2)), rf"{LENGTHS}: got \(True, 2\)"),
    "no batch": (
        lambda caches, hidden, batches: (caches, hidden, [batches[0], {}]),
        r"batch of rank 1: must have .positions, int64\[3\]: got 'dict' object has no attribute 'positions'",
    ),
}


@pytest.mark.parametrize("seed", [None, 3], ids=["plain", "hostile"])
@pytest.mark.parametrize("row", ROWS)
def test_refused_with_caches_as_they_were(row, seed):
    change, message = ROWS[row]
    run = SETUP.compiled(backends.get("cpu", ranks=2, adversary=seed), PROGRAM)
    caches, hidden, batches = SETUP.arguments()
    with pytest.raises(InputError, match=message):
        run(*change(caches, hidden, batches))
    for mine, before in zip(caches, SETUP.caches(), strict=True):
        assert torch.equal(mine.latent, before.latent) and torch.equal(mine.rope, before.rope)
    run(caches, hidden, batches)  # and the same function goes on working


def test_entries_behind_the_lengths_may_be_anything():
    garbage = torch.full_like(SETUP.batches()[0].block_table, 2147480000)
    for b, width in enumerate((2, 1)):
        garbage[b, :width] = SETUP.batches()[0].block_table[b, :width]
    caches, hidden, batches = SETUP.arguments()
    run = SETUP.compiled(backends.get("cpu", ranks=2), PROGRAM)
    out, _ = run(caches, hidden, [batch._replace(block_table=garbage) for batch in batches])
    plain, _ = run(SETUP.caches(), hidden, batches)
    assert torch.equal(out[0], plain[0])


def test_a_state_inside_a_parameter_is_refused():
    backend = backends.get("cpu", ranks=2)
    params, (caches, hidden, batches) = SETUP.params(), SETUP.arguments()
    big = torch.zeros(12 * 4 * 16 + 24 * 24)
    params[1] = params[1]._replace(o_proj=big[-params[1].o_proj.numel() :].view(params[1].o_proj.shape))
    run = backend.compile(PROGRAM, backend.prepare(PROGRAM, params))
    run(caches, hidden, batches)
    inside = [caches[0], caches[1]._replace(latent=big[-12 * 4 * 16 :].view(12, 4, 16))]
    with pytest.raises(InputError, match=r"cache.latent of rank 1: .* got memory that params.o_proj of rank 1 lies in"):
        run(inside, hidden, batches)


@pytest.mark.parametrize("seed", [None, 3], ids=["plain", "hostile"])
def test_one_tensor_as_two_states_is_refused(seed):
    """Of one rank: the caches of two layers."""
    setup = Setup(layers=2)
    program = schedule(setup.step, orchestrations.attention_aside)
    run = setup.compiled(backends.get("cpu", ranks=2, adversary=seed), program)
    caches, *rest = setup.arguments()
    before = caches[1][0].latent.clone()
    caches[1][1] = caches[1][0]
    message = r"cache\[0\].latent of rank 1: is updated in place .* cache\[1\].latent of rank 1 lies in too"
    with pytest.raises(InputError, match=message):
        run(caches, *rest)
    assert torch.equal(caches[1][0].latent, before)


def test_inputs_in_any_order():
    """The order of the inputs of a program is not that of its arguments: leaves go where their paths say."""
    inputs = PROGRAM.inputs
    for shuffled in (inputs[::-1], (*inputs[1::2], *inputs[::2])):
        program = evolve(PROGRAM, inputs=shuffled)
        run, names = SETUP.compiled(backends.get("cpu", ranks=2), program), ("cache", "hidden", "batch")
        given = dict(zip(names, SETUP.arguments(), strict=True))
        out, _ = run(*(given[name] for name in run.load.leaves.arguments))
        plain, _ = SETUP.compiled(backends.get("cpu", ranks=2), PROGRAM)(*SETUP.arguments())
        assert torch.equal(out[0], plain[0])


def test_a_program_without_anything_runs():
    for seed in (None, 1):
        assert backends.get("cpu", adversary=seed).compile(Program((), (), ()))() == ()


def test_integers_that_a_program_is_made_for():
    """They print, their launches change no more from step to step, and others are refused."""
    attention = [launch for launch in PROGRAM.launches if "batch.query_lengths" in launch.operands]
    assert PROGRAM.updatable() == tuple(attention) and len(attention) == 2
    fixed = PROGRAM.with_fixed({"batch.query_lengths": (1, 2)})
    assert [launch.op.name for launch in fixed.updatable()] == ["history_attention"]
    assert "batch.query_lengths: int64[2] host = (1, 2)" in map(str, fixed.inputs)
    run = SETUP.compiled(backends.get("cpu", ranks=2), fixed)
    caches, hidden, batches = SETUP.caches(), SETUP.hidden(), SETUP.batches(query=(1, 2))
    run(caches, hidden, batches)
    with pytest.raises(InputError, match=r"query_lengths of rank 0: must be \(1, 2\), for which .* made: got \(2, 1\)"):
        run(caches, hidden, SETUP.batches(query=(2, 1)))
    with pytest.raises(InputError, match="fixed: must name inputs of the program: got lengths"):
        PROGRAM.with_fixed({"lengths": (1, 2)})
    for name, values in (("batch.query_lengths", (1,)), ("batch.slots", (1, 2, 3))):
        with pytest.raises(InputError, match=f"fixed: {name} must be integers of the host, .*: got"):
            PROGRAM.with_fixed({name: values})
