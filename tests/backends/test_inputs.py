"""Bad input is refused before anything runs.

The error names the field, the rule and the value; caches stay as they were.
"""

import pytest
import torch

from mla_fx import backends, orchestrations
from mla_fx.effects import Aval, Input, InputError, Program, schedule
from tests.setups import Setup

SETUP = Setup()
PROGRAM = schedule(SETUP.step, orchestrations.attention_aside)


def with_batch(**changes):
    def change(params, caches, hidden, batches):
        return params, caches, hidden, [batches[0], batches[1]._replace(**changes)]

    return change


def table(row: int, column: int, block: int) -> torch.Tensor:
    found = SETUP.batches()[1].block_table.clone()
    found[row, column] = block
    return found


def slots(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def with_cache(make):
    def change(params, caches, hidden, batches):
        return params, [caches[0], caches[1]._replace(latent=make(caches[1].latent))], hidden, batches

    return change


def with_hidden(x):
    return lambda params, caches, hidden, batches: (params, caches, [hidden[0], x], batches)


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
        r"rank 1, write_cache: slots: each must be -1 or in 0..47 \(12 blocks of 4\): got 48",
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
        lambda params, caches, hidden, batches: (params, caches, hidden[:1], batches),
        r"hidden: must be a sequence with one entry for each of 2 ranks: got list of 1",
    ),
    "one cache for two ranks": (
        lambda params, caches, hidden, batches: (params, [caches[0]] * 2, hidden, batches),
        r"cache.latent: every rank must have a state of its own: got one tensor for several ranks",
    ),
    "no batch": (
        lambda params, caches, hidden, batches: (params, caches, hidden, [batches[0], {}]),
        r"batch of rank 1: must have .positions, int64\[3\]: got 'dict' object has no attribute 'positions'",
    ),
}


@pytest.mark.parametrize("seed", [None, 3], ids=["plain", "hostile"])
@pytest.mark.parametrize("row", ROWS)
def test_refused_with_caches_as_they_were(row, seed):
    change, message = ROWS[row]
    run = backends.get("cpu", ranks=2, adversary=seed).compile(PROGRAM)
    params, caches, hidden, batches = SETUP.arguments()
    with pytest.raises(InputError, match=message):
        run(*change(params, caches, hidden, batches))
    for mine, before in zip(caches, SETUP.caches(), strict=True):
        assert torch.equal(mine.latent, before.latent) and torch.equal(mine.rope, before.rope)
    run(params, caches, hidden, batches)  # and the same function goes on working


def test_entries_behind_the_lengths_may_be_anything():
    garbage = torch.full_like(SETUP.batches()[0].block_table, 2147480000)
    for b, width in enumerate((2, 1)):
        garbage[b, :width] = SETUP.batches()[0].block_table[b, :width]
    params, caches, hidden, batches = SETUP.arguments()
    run = backends.get("cpu", ranks=2).compile(PROGRAM)
    out, _ = run(params, caches, hidden, [batch._replace(block_table=garbage) for batch in batches])
    plain, _ = run(params, SETUP.caches(), hidden, batches)
    assert torch.equal(out[0], plain[0])


def test_names_that_are_no_path():
    bad = Program((Input("import os", Aval((2,), "fp32")),), ("import os",), ())
    with pytest.raises(InputError, match=r"input name: must be a word, then attributes or indices.*got 'import os'"):
        backends.get("cpu").compile(bad)
