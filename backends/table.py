"""What a backend does its own way: tables from op to rule, explicit, so that a type checker and a reader can follow.

A rule has one signature on every backend:

    rule(*operands, run, **parameters) -> results

Operands are tensors (host integers: tuples), by position; `run` says where it
runs (`mla_fx.backends.device.Run`); parameters are the fields of the op, by
keyword.  Results are a tuple of new tensors, contiguous, each in memory of its
own; a result that is an operand's next version is that operand, written in
place, and one that the op declares a view of an operand lies in it.  A rule
creates no stream and no event, and waits for nothing.  It is a function: of an
op without a group its results depend on operands and parameters alone, so
ranks with the same operands may have one call of it in common.

A collective is two of them with the transport between, which is the world's
(`mla_fx.backends.world`):

    sent    = send(*operands, run=run, **parameters)              one tensor, contiguous
    results = receive(moved, *operands, run=run, **parameters)    moved: what the transport brings
    results = together(*operands, **parameters)                   all of it, for a group whose ranks are all here

The last one may be missing.  Of every operand it is given that of every rank of
a group on the host, it gives what the others would, bit for bit, of every rank,
or once where the op is `alike` on all ranks, and serves ranks that share work.

Its results may lie in what was moved, beside each other: what is of one rank,
an entry of their first axis, is contiguous, and between ranks there may be gaps.

Beside rules, a table may have for an op

    takes   `takes(op, *avals) -> str | None`: why the backend cannot run the op on such operands; asked when compiling
    forms   operand -> function: the form that rules want it in, a tensor or several in its place.  A parameter is
            brought into it once, when it is prepared, and kept in it alone where all that it is for wants it so
    passes  from step to step, as `Backend.lower` applies them: fusing what the backend has an operator for
    captured  the rule in a captured program where the device updates no launches: integers on the host come to it as
            int64 tensors on the device, so that it works on shapes alone
    together `together(*operands, runs, **parameters) -> results`: a local rule for several ranks at once, on the host:
            of operands, `runs` and results it has one for each of them (`mla_fx.backends.several`), and gives each what
            the rule gives, bit for bit
    updates  `updates(op, *operands) -> str | None`: why a captured launch cannot be updated to such integers, which are
            tuples beside the avals of the rest; asked before each replay, and of avals alone when compiling
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from attrs import evolve, field, frozen

from mla_fx.effects import Op, Pass
from mla_fx.effects.aval import operand

#: See the top of this file.  A protocol with keywords of its own for every op cannot be written down.
Rule = Callable[..., Any]
#: An operand as its rules take it; several tensors where a library packs what is one operand piece by piece.
Formed = torch.Tensor | tuple[torch.Tensor, ...]
Form = Callable[[torch.Tensor], Formed]
#: `takes(op, *avals)`: why the op cannot run on such operands, in words; None where it can.
Takes = Callable[..., str | None]


def takes_any(op: Op, position: int) -> bool:
    """Whether an operand may be any tensor: a parameter comes there in the form that it is kept in.

    >>> from mla_fx.effects import ops
    >>> takes_any(ops.Prefetch(), 0), takes_any(ops.Linear(), 1)
    (True, False)
    """
    return operand(list(op.operands.values())[position]).kind == "any"


def tensors(of: Formed) -> tuple[torch.Tensor, ...]:
    """All that an operand consists of.

    >>> tensors(torch.ones(1)), tensors((torch.ones(1), torch.zeros(1)))
    ((tensor([1.]),), (tensor([1.]), tensor([0.])))
    """
    return of if isinstance(of, tuple) else (of,)


def formed(rule: Rule, forms: Mapping[int, Form]) -> Rule:
    """A rule whose operands at these positions are brought into a form first."""

    def with_forms(*operands: Any) -> Any:
        return rule(*(forms[k](x) if k in forms else x for k, x in enumerate(operands)))

    return with_forms if forms else rule


@frozen
class Collective:
    """The rule of an op that communicates, in two halves; see the top of this file."""

    send: Rule
    receive: Rule
    together: Rule | None = None


class MissingRuleError(LookupError):
    """A backend has no rule for an op of the program."""


def _frozen(given: Mapping[Any, Any]) -> Mapping[Any, Any]:
    return MappingProxyType(dict(given))


@frozen
class Table:
    """Rules, and what goes with them."""

    rules: Mapping[type[Op], Rule | Collective] = field(converter=_frozen)
    takes: Mapping[type[Op], Takes] = field(factory=dict, converter=_frozen)
    forms: Mapping[type[Op], Mapping[str, Form]] = field(factory=dict, converter=_frozen)
    passes: tuple[Pass, ...] = ()
    captured: Mapping[type[Op], Rule] = field(factory=dict, converter=_frozen)
    together: Mapping[type[Op], Rule] = field(factory=dict, converter=_frozen)
    updates: Mapping[type[Op], Takes] = field(factory=dict, converter=_frozen)

    def with_rules(self, rules: Mapping[type[Op], Rule | Collective]) -> "Table":
        """With rules added or replaced; what the old rule of an op took, and its other forms, go with it."""
        others: dict[str, Any] = {
            name: {op: given for op, given in getattr(self, name).items() if op not in rules}
            for name in ("takes", "forms", "captured", "together", "updates")
        }
        return evolve(self, rules={**self.rules, **rules}, **others)

    def for_capture(self) -> "Table":
        """With the rules of captured programs in place of the others."""
        return evolve(self, rules={**self.rules, **self.captured})

    def with_fusions(self, *fusions: "Fusion") -> "Table":
        """With fused ops that the backend has an operator for, and the passes that find them."""
        return evolve(
            self,
            rules={**self.rules, **{one.op: one.rule for one in fusions}},
            takes={**self.takes, **{one.op: one.takes for one in fusions}},
            forms={**self.forms, **{one.op: one.forms for one in fusions if one.forms}},
            passes=(*self.passes, *(one.find for one in fusions)),
        )

    def without_fusions(self, *fusions: "Fusion") -> "Table":
        """With the passes of these left out; a step that has such an op already still runs."""
        finds = [one.find for one in fusions]
        return evolve(self, passes=tuple(one for one in self.passes if one not in finds))


@frozen
class Fusion:
    """A fused op of one backend: an op with a definition, its rule, what it takes and wants, the pass that finds it."""

    op: type[Op]
    rule: Rule
    takes: Takes
    find: Pass
    forms: Mapping[str, Form] = field(factory=dict, converter=_frozen)
