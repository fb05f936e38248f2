"""A program as rows, run by one loop: a function, where its operands lie, where its results go.

Every value of every rank has a place of its own in a list; a drop empties it.
`mla_fx.backends.body` writes the rows of a program.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import length_hint
from typing import TYPE_CHECKING, Any

import torch
from attrs import field, frozen

from mla_fx.backends.contract import check_results
from mla_fx.backends.peers import PeerError
from mla_fx.effects import Aval, Launch

if TYPE_CHECKING:
    from mla_fx.backends.backend import Backend

#: A function, what it takes out of the list of values, where its one result goes (most have one, and an index costs a
#: third of a slice), where its results go, and the places to empty behind it.
Row = tuple[Callable[..., Sequence[Any]], Callable[[list[Any]], Sequence[Any]], int | None, slice, tuple[int, ...]]


#: Calls the function of row `number` on its operands, and gives its results.
Caller = Callable[[int, Callable[..., Sequence[Any]], Sequence[Any]], Sequence[Any]]


class RunError(RuntimeError):
    """A rule failed in the middle of a step: says which launch, where it was written, on which rank and stream.

    States may have been written by then.
    """

    def __init__(self, launch: Launch, rank: int | None, error: BaseException) -> None:
        self.launch, self.rank, self.error = launch, rank, error
        of = "all ranks" if rank is None else f"rank {rank}"
        tag = f"{launch.tag}: " if launch.tag else ""
        super().__init__(f"{tag}'{launch}' on stream {launch.stream}, {of}: {type(error).__name__}: {error}")

    def __reduce__(self) -> Any:
        return RunError, (self.launch, self.rank, self.error)


def takes_over(launch: Launch, spent: frozenset[str]) -> bool:
    """Whether a launch is a sum that may be made in the memory of its operand."""
    return launch.op.communicates == "all_reduce" and spent.issuperset(launch.operands)


@frozen(eq=False)
class Body:
    """Rows, with what each is of, for errors; `tail` are the values behind the inputs: parameters, then room."""

    rows: tuple[Row, ...]
    of: tuple[tuple[Launch | None, int | None], ...]
    tail: tuple[Any, ...]
    taken: tuple[int, ...]  # places of the outputs, output after output and rank after rank
    outputs: Callable[[list[Any]], Sequence[Any]]  # what picks them out of the values
    backend: "Backend"
    others: tuple[Any, ...]  # streams beside main
    avals: Mapping[str, Aval]
    spent: frozenset[str]
    proven: list[bool] = field(factory=lambda: [False])  # whether a run has shown what the rules give

    def __call__(self, values: list[Any]) -> Sequence[Any]:
        """From the leaves of the inputs to those of the outputs, output after output and rank after rank."""
        if not self.backend.device.has_streams:
            self.issue(values)
            return self.outputs(values)
        device = self.backend.device
        caller = device.enter(self.others)
        try:
            self.issue(values)
            return self.outputs(values)
        except BaseException:
            device.module.synchronize()  # nothing that was issued outlives the tensors it reads
            raise
        finally:
            device.leave(caller)

    def issue(self, values: list[Any], call: Caller | None = None) -> None:
        """Run all rows on `values`, the leaves of the inputs, behind which come the others.

        `call` calls the functions, and in the first run what holds their results against the contract.
        """
        values += self.tail
        rows = iter(self.rows)
        if call is None and not self.proven[0]:
            call = self.held
        try:
            if call is None:
                for function, take, at, put, empty in rows:
                    if at is None:
                        values[put] = function(*take(values))
                    else:
                        (values[at],) = function(*take(values))
                    for place in empty:
                        values[place] = None
                return
            for number, (function, take, _, put, empty) in enumerate(rows):
                values[put] = call(number, function, take(values))
                for place in empty:
                    values[place] = None
        except Exception as error:
            launch, rank = self.of[len(self.rows) - 1 - length_hint(rows)]
            if launch is None:
                raise
            if isinstance(error, PeerError):
                raise error.at(launch) from None
            raise RunError(launch, rank, error) from error
        self.proven[0] = True

    def held(self, number: int, function: Callable[..., Sequence[Any]], operands: Sequence[Any]) -> Sequence[Any]:
        """The results of a row, held against the contract of a rule."""
        results = function(*operands)
        self._hold(number, operands, results)
        return results

    def _hold(self, number: int, operands: Sequence[Any], results: Any) -> None:
        """Hold results against the contract of a rule, rank by rank."""
        launch, rank = self.of[number]
        if launch is None:
            return
        avals = [self.avals[name] for name in launch.results]
        check = partial(check_results, spent=takes_over(launch, self.spent))
        if rank is not None:
            return check(launch, operands, results, avals)
        count, give = len(launch.operands), len(avals)
        if len(operands) == count:  # of several ranks at once
            operands = _flat(operands)
        if len(results) == give and not isinstance(results[0], torch.Tensor):
            results = _flat(results)
        ranks = len(operands) // count
        each = ranks * give // len(results)  # so many ranks share results
        for k in range(ranks):
            at = k // each * give
            check(launch, operands[k * count : (k + 1) * count], results[at : at + give], avals)
        return None


def _flat(of: Sequence[Sequence[Any]]) -> list[Any]:
    """What is side by side for several ranks, rank after rank."""
    return [one for of_rank in zip(*of, strict=True) for one in of_rank]
