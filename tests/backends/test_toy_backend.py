"""A backend is a table of differences: here is one, in fewer than 40 lines, and a layer that runs on it."""

import torch

from mla_fx import backends, orchestrations
from mla_fx.backends import Backend, InProcess, Table, cpu
from mla_fx.effects import ops, schedule
from tests.setups import Setup


def v_up(attn, w_uv, *, run, group, flat):
    """One contraction for all heads, with the weight in the form that it was prepared in."""
    assert flat and group is None
    return (torch.einsum("tnl,nvl->tnv", attn, w_uv).flatten(1),)


def combine(recv, recv_lse, local, local_lse, *, run, flat):
    """All partials in one softmax over their LSEs, in float32; what saw no key is selected away."""
    parts, lse = torch.cat([recv, local[None]]).float(), torch.cat([recv_lse, local_lse[None]])
    seen = lse.isfinite()
    weights = torch.softmax(lse, 0).where(seen, 0)
    merged = (weights[..., None] * parts.where(seen[..., None], 0)).sum(0).to(local.dtype)
    return (merged.flatten(1) if flat else merged,)


def takes_combine(op, recv, *others):
    """A limit, so that a program beyond it is refused when it is compiled."""
    return f"ranks: must be at most 4 here: got {recv.shape[0]}" if recv.shape[0] > 4 else None


TOY = Table(
    {**cpu.TABLE.rules, ops.VUp: v_up, ops.Combine: combine},
    takes={ops.Combine: takes_combine},
    forms={**cpu.TABLE.forms, ops.VUp: {"w_uv": lambda w: w.transpose(1, 2).contiguous()}},
)


def outputs(backend, setup):
    """Of one step."""
    program = schedule(setup.step, orchestrations.attention_aside)
    run = backend.compile(program, backend.prepare(program, setup.params()))
    out, _ = run(*backend.put(setup.arguments(), copy=True))
    return out


def test_a_layer_runs_on_it():
    setup = Setup(ranks=4)
    ours = outputs(Backend("toy", TOY, InProcess(4)), setup)
    exact = outputs(backends.get("reference", ranks=4), setup)
    for mine, right in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-4)


def test_what_it_does_not_take_is_refused_when_compiling():
    setup = Setup(ranks=8)
    program = schedule(setup.step, orchestrations.serial)
    toy = Backend("toy", TOY, InProcess(8))
    try:
        toy.compile(program, toy.prepare(program, setup.params()))
    except ValueError as error:
        assert str(error) == "attention, combine: ranks: must be at most 4 here: got 8"
    else:
        raise AssertionError("8 ranks were taken")
