"""Passes: from a step to a step that computes the same.

    rewrite(step, match)   replaces equations, where `match` says by what
    inline(step, keep)     replaces ops by their definitions, all but those in `keep`

A pass is any function from step to step.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

from attrs import evolve, frozen

from mla_fx.effects.aval import Aval, operand
from mla_fx.effects.op import Op
from mla_fx.effects.step import Equation, Names, Step, StepError, memory_of, on_host, trace, versions_of

Pass = Callable[[Step], Step]


@frozen
class Found:
    """Equations that one takes the place of: it gives their results, all that others need, under the same names."""

    parts: tuple[Equation, ...]
    whole: Equation


def rewrite(step: Step, match: Callable[[Step, Equation], Found | None]) -> Step:
    """The step with what `match` finds replaced.  `match` is asked of every equation, as the last of its parts.

    A find is left alone where it would change what the step means: where a result that the whole does not give is
    needed elsewhere, where the whole writes other states than its parts, where parts overlap those of an earlier
    find, or where the last part cannot be issued in the place of all, since something between them needs a part's
    result or touches what a part writes, or writes what a part reads.  Raises `StepError` for parts that are none, and
    for a whole whose results are not of the shape and dtype that the parts' are.
    """
    place = {equation.results: index for index, equation in enumerate(step.equations) if equation.results}
    moves: _Moves | None = None
    gone: dict[int, Equation | None] = {}
    for index, equation in enumerate(step.equations):
        found = match(step, equation)
        if found is None:
            continue
        for part in found.parts:
            if part.results not in place:
                raise StepError(f"parts: each must be an equation of {step.name}: got '{part}'")
        parts = sorted(place[part.results] for part in found.parts)
        moves = moves or _Moves(step)
        # Finds are checked one by one, in the order of the step as it was.  That is enough: where two finds change
        # places, one of them has a part between parts of the other, and is held against it there.
        if parts[-1:] == [index] and gone.keys().isdisjoint(parts) and moves.mean_the_same(parts, found.whole):
            gone.update(dict.fromkeys(parts[:-1]))
            gone[index] = found.whole
    if not gone:
        return step
    kept = (gone.get(index, equation) for index, equation in enumerate(step.equations))
    new = [equation for equation in gone.values() if equation is not None]
    return step.rewritten(tuple(equation for equation in kept if equation is not None), new)


class _Moves:
    """Which equations of a step can be issued later than they are written."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.root = memory_of((put.name for put in step.inputs), step.equations)
        self.readers: dict[str, list[int]] = defaultdict(list)
        for index, equation in enumerate(step.equations):
            for name in equation.operands:
                self.readers[name].append(index)

    def written(self, equation: Equation) -> set[str]:
        """The memory that an equation writes, of what it takes."""
        return {self.root[equation.operands[position]] for position in equation.op.written()}

    def touched(self, equation: Equation) -> set[str]:
        """The memory that an equation takes."""
        return {self.root[name] for name in equation.operands}

    def lying(self, equations: Sequence[Equation], results: Sequence[str]) -> dict[str, str]:
        """Those of the results that lie in memory which the equations take, each with that memory."""
        made = {name for equation in equations for name in equation.results}
        taken = {name for equation in equations for name in equation.operands} - made
        root = memory_of(taken, equations)
        return {name: self.root.get(root[name], "") for name in results if root.get(name) in taken}

    def mean_the_same(self, parts: Sequence[int], whole: Equation) -> bool:
        """Whether `whole`, in the place of the last part, means what the parts mean."""
        equations, among = self.step.equations, set(parts)
        mine = [equations[index] for index in parts]
        given = {name for part in mine for name in part.results}
        written = {memory for part in mine for memory in self.written(part)}
        touched = {memory for part in mine for memory in self.touched(part)}
        inside = given - set(whole.results)
        if self.lying(mine, whole.results) != self.lying([whole], whole.results):
            return False
        # What the parts make for themselves has memory that nobody else knows: writing it is no matter of the whole's.
        if written - inside != {self.root.get(whole.operands[position], "") for position in whole.op.written()}:
            return False
        if not inside.isdisjoint(self.step.outputs) or any(not among.issuperset(self.readers[n]) for n in inside):
            return False  # somebody else needs it
        for index in range(parts[0] + 1, parts[-1]):
            if index in among:
                continue
            between = equations[index]
            if not given.isdisjoint(between.operands):
                return False  # a part's result is needed before the last part
            if not self.written(between).isdisjoint(touched) or not written.isdisjoint(self.touched(between)):
                return False  # a state changes between a part and the last one
        return True


def inline(step: Step, keep: Collection[type[Op]] = ()) -> Step:
    """The step with every op that has a definition replaced by its parts, and these by theirs, all but `keep`."""
    avals = step.avals()
    free = Names(set(avals))
    equations: list[Equation] = []
    for equation in step.equations:
        if type(equation.op) in keep or not defined(equation.op):
            equations.append(equation)
            continue
        parts = inline(definition(equation.op, tuple(avals[name] for name in equation.operands)), keep)
        names = dict(zip((put.name for put in parts.inputs), equation.operands, strict=True))
        names.update(zip(parts.outputs, equation.results, strict=True))
        for part in parts.equations:
            for name in part.results:
                if name not in names:
                    names[name] = free.unused("_".join((*equation.results[:1], name)))
            operands, results = ([names[name] for name in group] for group in (part.operands, part.results))
            equations.append(Equation(part.op, tuple(operands), tuple(results), equation.tag))
    return evolve(step, equations=tuple(equations))


def defined(op: Op) -> bool:
    """Whether an op is made of simpler ones."""
    return type(op).definition is not Op.definition


def definition(op: Op, avals: Sequence[Aval]) -> Step:
    """The parts of an op as a step of its operands; raises `StepError` where they are not what the op says."""
    named = zip(op.operands.items(), avals, strict=True)
    arguments = {name: on_host(aval) if operand(text).on_host else aval for (name, text), aval in named}
    step = trace(lambda **operands: tuple(op.definition(*operands.values()) or ()), op.name, **arguments)
    found, root = step.avals(), memory_of(op.operands, step.equations)
    given = tuple(found[name] for name in step.outputs)
    if given != op.infer(*avals):
        raise StepError(
            f"{op.name}: its definition must give what it gives: got {', '.join(map(str, given)) or 'none'}"
        )
    if len(set(step.outputs)) < len(step.outputs) or not set(step.outputs).isdisjoint(op.operands):
        raise StepError(f"{op.name}: its parts must give every result, and each once: got {step.outputs}")
    versions = {step.outputs[result]: list(op.operands)[position] for position, result in op.written().items()}
    views = {step.outputs[result]: list(op.operands)[position] for result, position in op.viewed().items()}
    written = {root[part.operands[position]] for part in step.equations for position in part.op.written()}
    in_place = {name: root[name] for name in step.outputs if root[name] in op.operands}
    seen = {name: memory for name, memory in in_place.items() if name not in versions and memory not in written}
    in_place = {name: memory for name, memory in in_place.items() if name not in seen}
    if in_place != versions or not written.intersection(op.operands) <= set(versions.values()):
        raise StepError(
            f"{op.name}: its parts must write what it writes, {', '.join(versions.values()) or 'nothing'}: got {step}"
        )
    if seen != views:
        said = ", ".join(views.values()) or "nothing"
        raise StepError(f"{op.name}: its parts must give views of what it does, {said}: got {step}")
    replaced, shown = set[str](), versions_of(op.operands, step.equations)
    for part in step.equations:
        if not replaced.isdisjoint(shown[name] for name in part.operands):
            raise StepError(f"{op.name}: its parts run as written, so none may take what is replaced: got '{part}'")
        replaced.update(shown[part.operands[position]] for position in part.op.written())
        if part.op.communicates:
            raise StepError(f"{op.name}: the parts of an op must not communicate: got '{part}'")
        if not set(part.op.uses) <= set(op.uses):
            raise StepError(f"{op.name}: must use the workspaces of its parts: got '{part}', which uses {part.op.uses}")
    return step
