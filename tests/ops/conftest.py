"""One op's rule, run on the backend and dtype of a test, with what every rule must keep."""

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from mla_fx.backends import cpu, cuda, reference
from mla_fx.backends.device import Run
from mla_fx.backends.table import Collective, Table
from mla_fx.backends.world import InProcess
from mla_fx.dtypes import DTYPES
from mla_fx.effects import Aval, Op
from mla_fx.effects.aval import FLOATS

NAMES = {dtype: name for name, dtype in DTYPES.items()}
#: One rounding of the result, and what accumulation in the wide dtype may add to sums of size 1.
TOLERANCE = {
    torch.bfloat16: (2**-8, 1e-5),
    torch.float16: (2**-11, 1e-5),
    torch.float32: (1e-5, 1e-5),
    torch.float64: (1e-12, 1e-12),
}


def aval(operand: Any) -> Aval:
    """What an operand is; host integers, which are tuples, have the dtype that Python's integers are held against."""
    if isinstance(operand, tuple):
        return Aval((len(operand),), "int64")
    return Aval(tuple(operand.shape), NAMES[operand.dtype])


def memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@attrs.frozen
class Rules:
    """A backend's rules and the dtype a test runs them in."""

    table: Table
    dtype: torch.dtype

    @property
    def wide(self) -> torch.dtype:
        """What LSEs and angles are in."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def tensor(self, values: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values)).to(dtype or self.dtype)

    def random(self, rng: np.random.Generator, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.tensor(rng.standard_normal(shape), dtype)

    def __call__(self, op: Op, *operands: Any, rank: int = 0) -> tuple[torch.Tensor, ...]:
        """Run the rule; hold shapes and dtypes against the descriptor, and memory against the operands."""
        assert not op.communicates
        results = self.rule(op)(*self.formed(op, operands), run=Run(rank), **fields(op))
        self.check(op, operands, results)
        return results

    def group(self, op: Op, operands: Sequence[tuple[torch.Tensor, ...]]) -> list[tuple[torch.Tensor, ...]]:
        """Run a collective for all ranks: what each sends, moved, is what each receives."""
        rule, ranks = self.rule(op), len(operands)
        assert isinstance(rule, Collective) and op.group_of().size == ranks
        sent = [rule.send(*operands[rank], run=Run(rank), **fields(op)) for rank in range(ranks)]
        moved = InProcess(ranks).move(op.communicates, sent, group="tp")
        if op.communicates == "all_to_all_v":
            assert all(rows.is_contiguous() and len(rows) == sum(counts) for rows, counts in sent)
            assert all(same(*pair) for pair in zip(moved, transport_of_rows(sent), strict=True))
        else:
            assert all(one.is_contiguous() and aval(one) == aval(sent[0]) for one in sent)
            assert all(map(torch.equal, map(bits, moved), map(bits, transport(op.communicates, sent))))
        results = [rule.receive(moved[rank], *operands[rank], run=Run(rank), **fields(op)) for rank in range(ranks)]
        for given, got in zip(operands, results, strict=True):
            self.check(op, given, got)
        mine = [{memory(t) for t in got if t.numel()} for got in results]
        theirs = {memory(t) for given in operands for t in given}
        assert sum(len(got) for got in mine) == len(set().union(*mine)), "two ranks share memory"
        assert not set().union(*mine) & theirs, "a result lies in an operand of some rank"
        return results

    def rule(self, op: Op) -> Any:
        return self.table.rules[type(op)]

    def formed(self, op: Op, operands: Sequence[Any]) -> list[Any]:
        """Operands in the form that the rule wants them in."""
        forms = self.table.forms.get(type(op), {})
        return [forms[name](x) if name in forms else x for name, x in zip(op.operands, operands, strict=True)]

    def check(self, op: Op, operands: Sequence[Any], results: tuple[torch.Tensor, ...]) -> None:
        assert isinstance(results, tuple) and len(results) == len(op.results)
        assert tuple(map(aval, results)) == op.infer(*map(aval, operands))
        tensors = [t for t in operands if isinstance(t, torch.Tensor)]
        given = dict(zip(op.operands, operands, strict=True))
        states = {version: given[name] for name, version in op.writes.items()}
        for name, result in zip(op.results, results, strict=True):
            if name in states:
                assert result is states[name]
            else:
                # of a collective, what is of one rank lies in one piece
                assert (result[:1] if op.communicates else result).is_contiguous()
                assert result.numel() == 0 or memory(result) not in set(map(memory, tensors))

    def close(self, got: torch.Tensor, want: Any) -> None:
        """Equal up to a rounding in the result's own dtype; NaN and infinities must coincide."""
        relative, absolute = TOLERANCE[got.dtype]
        np.testing.assert_allclose(exact(got), np.asarray(want), rtol=relative, atol=absolute)


def fields(op: Op) -> dict[str, Any]:
    """The parameters of an op, as a rule gets them: a group stays a group."""
    return attrs.asdict(op, recurse=False)


def transport(how: str, sent: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What every rank is brought, written out: all that was sent, its own part of each, or the sum in rank order."""
    if how == "all_gather":
        return [torch.stack(list(sent)) for _ in sent]
    if how == "all_to_all":
        return [torch.stack([one[rank] for one in sent]) for rank in range(len(sent))]
    total = sum((one.to(torch.promote_types(one.dtype, torch.float32)) for one in sent[1:]), sent[0])
    return [total.to(sent[0].dtype) for _ in sent]


def transport_of_rows(sent: Sequence[tuple[torch.Tensor, Sequence[int]]]) -> list[tuple[torch.Tensor, list[int]]]:
    """Of rows for each rank, rank after rank, what each is brought."""
    found = []
    for rank in range(len(sent)):
        parts = [rows[sum(counts[:rank]) : sum(counts[: rank + 1])] for rows, counts in sent]
        found.append((torch.cat(parts), [len(part) for part in parts]))
    return found


def same(moved: tuple[torch.Tensor, Sequence[int]], right: tuple[torch.Tensor, Sequence[int]]) -> bool:
    """Bit for bit, and from the same ranks."""
    return torch.equal(bits(moved[0]), bits(right[0])) and list(moved[1]) == list(right[1])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers, so that NaN equals NaN and -0 is not 0."""
    return tensor.contiguous().view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    )


def on_cpu(dtype: torch.dtype) -> Rules:
    """The rules of `cpu`, for a test that asks for what only a rule that rounds can show."""
    return Rules(cpu.TABLE, dtype)


def exact(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as float64, for an oracle."""
    return tensor.to(torch.float64).numpy()


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with gaps between rows and features, and the first two axes swapped in memory."""
    axes = [1, 0, *range(2, tensor.dim())] if tensor.dim() > 1 else [0]
    shape = [tensor.shape[a] for a in axes]
    room = torch.full([*shape[:-1], 2 * shape[-1]], -7, dtype=tensor.dtype)[..., ::2].permute(axes)
    return room.copy_(tensor)


#: The rules of `cuda` are plain torch, and here run on tensors of the host.
RUNS = [
    ("reference", reference.TABLE, "fp64"),
    *(("cpu", cpu.TABLE, dtype) for dtype in FLOATS),
    *(("cuda", cuda.TABLE, dtype) for dtype in FLOATS),
]


@pytest.fixture(params=RUNS, ids=lambda run: f"{run[0]}-{run[2]}")
def rules(request: pytest.FixtureRequest) -> Rules:
    _, table, dtype = request.param
    return Rules(table, DTYPES[dtype])


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)
