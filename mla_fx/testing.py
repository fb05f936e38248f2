"""For your own tests: a fixture that swaps the backend, and a comparison that runs a program everywhere.

    from mla_fx.testing import backend  # noqa: F401

    def test_mine(backend):
        made = backend(ranks=4)
        run = made.compile(program, made.prepare(program, params))

runs the test on `reference`, on `cpu`, and on `cpu` under the hostile machine;
`@pytest.mark.parametrize("backend", ["cpu"], indirect=True)` chooses one, and
"ascend", which is not among those, runs the test through torch_npu on the
emulated CANN, whose streams are interleaved by the seed.
Needs pytest.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

from mla_fx import backends
from mla_fx.backends import Backend
from mla_fx.effects import Program

#: What the fixture runs: a backend's name, with "-adversary" for the hostile machine.
CHOICES = ("reference", "cpu", "cpu-adversary")


@pytest.fixture(params=CHOICES)
def backend(request: pytest.FixtureRequest) -> Callable[..., Backend]:
    """A maker of backends: `backend(ranks=4)`, and `backend(ranks=4, seed=7)` for another interleaving."""
    name, _, hostile = request.param.partition("-")

    def make(*, ranks: int = 1, seed: int = 0) -> Backend:
        if name == "ascend":
            from mla_fx.backends.ascend.emulator import emulate

            emulate(seed=seed)
            return backends.get(name, ranks=ranks)
        return backends.get(name, ranks=ranks, adversary=seed if hostile else None)

    return make


def assert_runs_alike(
    program: Program,
    *arguments: Any,
    params: Sequence[Any] = (),
    ranks: int,
    seeds: int = 8,
    rtol: float = 1e-2,
    atol: float = 1e-2,
) -> None:
    """Run one step on `reference`, `cpu` and the hostile machine, and compare all outputs.

    `cpu` must agree with `reference` within the tolerances, and the hostile machine with `cpu` bit for bit under each
    of `seeds` seeds.  `params` has the parameters of each rank, `arguments` are those of the compiled program, both
    in the program's dtype; arguments are copied, so states stay as they are.  Raises `AssertionError`.
    """
    given = [params] if any(put.role == "parameter" for put in program.inputs) else []

    def outputs(chosen: Backend) -> list[Any]:
        run = chosen.compile(program, chosen.prepare(program, *given))
        return pytree.tree_leaves(run(*chosen.put(arguments, copy=True)))

    plain, exact = outputs(backends.get("cpu", ranks=ranks)), outputs(backends.get("reference", ranks=ranks))
    for ours, right in zip(plain, exact, strict=True):
        torch.testing.assert_close(ours.double(), right, rtol=rtol, atol=atol, equal_nan=True)
    for seed in range(seeds):
        for ours, hostile in zip(plain, outputs(backends.get("cpu", ranks=ranks, adversary=seed)), strict=True):
            same = torch.equal(ours.nan_to_num(), hostile.nan_to_num()) and torch.equal(ours.isnan(), hostile.isnan())
            assert same, f"under seed {seed} the result differs: the program has a race that the law missed"
