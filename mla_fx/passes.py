"""Passes on the steps of a model: other ways to the same values, and effects that change none.

    replicate_query         every rank projects the queries of all heads, and nothing is gathered
    project_before_merge    values are projected before the exchange, so that V features of a head cross instead of L
    prefetch_weights        a projection's weight is fetched into the cache while the collective before it runs

The first two ask for parameters of other shapes, and change the inputs that have them; `mla_fx.weights` gives a
rank's part in that form, so a step that is made with `StepShape(replicate_query=True)` has been through the pass.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from attrs import evolve

from mla_fx.effects import Aval, Equation, Op, Step, StepError, ops
from mla_fx.effects.op import stem
from mla_fx.effects.step import Names

#: Ops that read a projection's weight, and which operand that is.
_READERS: Final[Mapping[type[Op], str]] = {ops.Linear: "weight", ops.QuantLinear: "weight", ops.VUp: "w_uv"}


def replicate_query(step: Step) -> Step:
    """Every rank projects all heads: what was gathered is there, and the current part takes its own heads of it.

        q = x . q_b_proj of all heads        q_own[t, n] = q[t, rank * N + n]

    The last projection of the query, and `w_uk`, are of all heads.  Source: vLLM's `dcp_q_replicate`.
    """
    avals, producer = step.avals(), _Producers(step)
    grown: dict[str, Aval] = {}
    renamed: dict[str, str] = {}
    new: dict[tuple[str, ...], Sequence[Equation]] = {}
    free = Names(set(avals))
    for gather in step.equations:
        if not isinstance(gather.op, ops.GatherHeads):
            continue
        group = gather.op.group
        absorb, rotate = producer(gather.operands[0], ops.AbsorbQuery), producer(gather.operands[1], ops.Rope)
        project = producer(absorb.operands[0], ops.Linear, ops.QuantLinear)
        for name in (absorb.operands[1], *project.operands[1:]):
            grown[name] = _times(avals[name], group.size)
        heads = avals[gather.operands[1]].shape[1] * group.size
        new[rotate.results] = (evolve(rotate, op=ops.Rope(heads)),)
        own = {name: free.unused(f"{name}_own") for name in gather.operands}
        new[gather.results] = [
            Equation(ops.LocalHeads(group), (name,), (taken,), gather.tag) for name, taken in own.items()
        ]
        renamed |= own | dict(zip(gather.results, gather.operands, strict=True))
    return _replaced(step, new, grown, renamed)


def project_before_merge(step: Step) -> Step:
    """Values are projected where their part was attended to, and merged as values.

        W_UV^T sum_i w[i] o[i] / sum_i w[i]  =  sum_i w[i] (W_UV^T o[i]) / sum_i w[i]

    The merge weighs a head's parts by numbers, so a matrix of the head may come before it.  V features and an LSE
    cross the wire for a head and token, not L and an LSE; each rank projects all H heads of its shard, for which
    `w_uv` is of all heads, and its N heads of the current part.  Source: vLLM PR #48196, ROCm ATOM #2001.
    """
    avals, producer = step.avals(), _Producers(step)
    grown: dict[str, Aval] = {}
    new: dict[tuple[str, ...], Sequence[Equation]] = {}
    free = Names(set(avals))
    for up in step.equations:
        if not isinstance(up.op, ops.VUp):
            continue
        merge = producer(up.operands[0], ops.Combine)
        exchange = producer(merge.operands[0], ops.AllToAll)
        (hist, hist_lse), (*received, cur, cur_lse), w_uv = exchange.operands, merge.operands, up.operands[1]
        group = exchange.op.group_of()
        grown[w_uv] = _times(avals[w_uv], group.size if group else 1)
        hist_v, cur_v = (free.unused(f"{name}_v") for name in (hist, cur))
        new[exchange.results] = (
            Equation(ops.VUp(flat=False), (hist, w_uv), (hist_v,), up.tag),
            evolve(exchange, operands=(hist_v, hist_lse)),
        )
        new[merge.results] = (
            Equation(ops.VUp(group, flat=False), (cur, w_uv), (cur_v,), up.tag),
            Equation(ops.Combine(flat=True), (*received, cur_v, cur_lse), up.results, merge.tag),
        )
        new[up.results] = ()
    return _replaced(step, new, grown)


def prefetch_weights(step: Step) -> Step:
    """A prefetch before each collective, of every projection's weight that is read between it and the next one.

    It follows what the collective sends last (behind a history attention the LSEs, which are small to keep), and
    nothing waits for it.  Experts' weights are left out: which of them are read is not known yet.
    """
    parameters = {put.name for put in step.inputs if put.role == "parameter"}
    equations: list[Equation] = []  # from the last to the first
    read: list[str] = []
    for equation in reversed(step.equations):
        equations.append(equation)
        if equation.op.communicates:
            after = equation.operands[-1]
            equations += [Equation(ops.Prefetch(), (name, after), (), equation.tag) for name in reversed(read)]
            read = []
        elif type(equation.op) in _READERS:
            weight = equation.operands[list(equation.op.operands).index(_READERS[type(equation.op)])]
            read = [weight, *(name for name in read if name != weight)] if weight in parameters else read
    return evolve(step, equations=tuple(equations[::-1]))


class _Producers:
    """What gives each value of a step."""

    def __init__(self, step: Step) -> None:
        self.name = step.name
        self.of = {name: equation for equation in step.equations for name in equation.results}

    def __call__(self, name: str, *kinds: type[Op]) -> Equation:
        """The equation of one of these ops that gives a value; raises `StepError`."""
        found = self.of.get(name)
        if found is None or not isinstance(found.op, kinds):
            wanted = " or ".join(stem(kind) for kind in kinds)
            raise StepError(f"{self.name}: {name} must be a result of {wanted}: got '{found or name}'")
        return found


def _times(aval: Aval, ranks: int) -> Aval:
    """Of all ranks' heads, which are the first axis."""
    first, *rest = aval.shape
    return Aval((first * ranks, *rest), aval.dtype)


def _replaced(
    step: Step,
    new: Mapping[tuple[str, ...], Sequence[Equation]],
    grown: Mapping[str, Aval],
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> Step:
    """The step with `new` for the equations with these results; the others take what is `renamed`."""
    equations: list[Equation] = []
    for equation in step.equations:
        operands = tuple(renamed.get(name, name) for name in equation.operands)
        equations += new.get(equation.results, (evolve(equation, operands=operands),))
    inputs = tuple(evolve(put, aval=grown.get(put.name, put.aval)) for put in step.inputs)
    return evolve(step, inputs=inputs, equations=tuple(equations))
