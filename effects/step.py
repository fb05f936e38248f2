"""A step: what is to be computed, before anything is scheduled, as a value.

    inputs       what comes in: name, shape and dtype, where it lives, what it is
    equations    an op, its operands and its results by name, in the order in which they were written
    outputs      names of what comes out

A step prints like a jaxpr and compares by value.  `trace` makes one by calling
a function with `Value`s: to `bind` an op to values appends an equation and
gives its results; nothing runs.  Inputs are pytrees (tuples, lists, dicts,
NamedTuples) and are named by the argument and the path inside it.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, Literal, Protocol

import torch.utils._pytree as pytree
from attrs import Factory, define, evolve, field, frozen

from mla_fx.effects.aval import Aval, ShapeError
from mla_fx.effects.op import Op
from mla_fx.effects.validate import InputError, one_of

#: Where an input lives: on the device; on the host, from where a step sends it to the device; on the host for good.
Place = Literal["device", "staged", "host"]
#: What an input is: prepared once; updated in place by a step; different in every step.
Role = Literal["parameter", "state", "data"]
PLACES: Final = ("device", "staged", "host")
ROLES: Final = ("parameter", "state", "data")


class StepError(ValueError):
    """A step that is none: a name that is there twice, or before anything gives it, or a value of another trace."""


@frozen
class Input:
    """A value that comes from outside, owned by the caller.

    `path` says how to reach it: the name of the argument, then torch's pytree keys.  It is ready on the main stream
    when a run starts; what is staged, once it has been sent.  `fixed`: the integers that a host input always has, of
    a program that is made for them (`Program.with_fixed`); None where they change from step to step.
    """

    name: str
    aval: Aval
    place: Place = field(default="device", validator=one_of(*PLACES))
    role: Role = field(default="data", validator=one_of(*ROLES))
    path: tuple[Any, ...] = field(default=Factory(lambda self: (self.name,), takes_self=True), repr=False)
    fixed: tuple[int, ...] | None = None

    def __attrs_post_init__(self) -> None:
        if self.fixed is not None and (self.place != "host" or len(self.fixed) != self.aval.shape[0]):
            raise InputError(f"fixed: {self.name} must be integers of the host, {self.aval}: got {self.fixed}")

    def __str__(self) -> str:
        notes = [word for word in (self.role, self.place) if word not in ("data", "device")]
        made_for = [] if self.fixed is None else [f"= {self.fixed}"]
        return " ".join([f"{self.name}: {self.aval}", *notes, *made_for])


@frozen
class Equation:
    """`results` = `op` of `operands`; `tag` is the scope in which it was written, as in "layers.3.attention"."""

    op: Op
    operands: tuple[str, ...]
    results: tuple[str, ...]
    tag: str = ""

    def within(self, scope: str) -> bool:
        """Whether the equation was written in a scope of this name, at any depth.

        >>> from mla_fx.effects import ops
        >>> Equation(ops.Add(), ("x", "y"), ("out",), "layers.3.attention").within("attention")
        True
        """
        return f".{scope}." in f".{self.tag}."

    def __str__(self) -> str:
        return call(self)


class Applied(Protocol):
    """An op applied to values by name: an equation of a step, or a launch of a program."""

    @property
    def op(self) -> Op:
        """What is computed."""

    @property
    def operands(self) -> tuple[str, ...]:
        """Of what."""

    @property
    def results(self) -> tuple[str, ...]:
        """What it gives."""


def call(applied: Applied) -> str:
    """How an op applied to values is written: results, op, operands."""
    results = f"{', '.join(applied.results)} = " if applied.results else ""
    return f"{results}{applied.op.name} {' '.join(applied.operands)}"


@frozen
class Step:
    """A computation as a value.  Raises `StepError` for names that are there twice or not at all.

    `tree` says how outputs are packed for the caller (a torch pytree spec), None for a plain tuple.
    """

    name: str
    inputs: tuple[Input, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[str, ...]
    tree: Any = field(default=None, repr=False)
    _avals: Mapping[str, Aval] | None = field(default=None, init=False, repr=False, eq=False)  # once they are known

    def __attrs_post_init__(self) -> None:
        known: set[str] = set()
        for put in self.inputs:
            if put.name in known:
                raise StepError(f"inputs: each name must be there once: got {put.name} twice")
            known.add(put.name)
        for equation in self.equations:
            op, operands, results = equation.op, equation.operands, equation.results
            if not known.issuperset(operands):
                name = next(name for name in operands if name not in known)
                raise StepError(f"'{equation}': each operand must be an input or an earlier result: got {name}")
            for what, declared, named in (("operands", op.operands, operands), ("results", op.results, results)):
                if len(declared) != len(named):
                    raise StepError(f"'{equation}': must name {len(declared)} {what}: got {len(named)}")
            for name in results:
                if name in known:
                    raise StepError(f"'{equation}': each result must have a name of its own: got {name} again")
                known.add(name)
        for name in self.outputs:
            if name not in known:
                raise StepError(f"outputs: each must be an input or a result: got {name}")

    def avals(self) -> dict[str, Aval]:
        """Shape and dtype of every value, by the shape rules; raises `ShapeError`."""
        if self._avals is None:
            object.__setattr__(self, "_avals", avals_of(self.inputs, self.equations))
        return dict(self._avals or {})

    def rewritten(self, equations: tuple["Equation", ...], new: Iterable["Equation"]) -> "Step":
        """The step with other equations, all of which it has but the `new` ones, whose results it had of others.

        Raises `StepError` where these have other shapes or dtypes now.
        """
        avals = self.avals()
        for equation in new:
            given = equation.op.infer(*(avals[name] for name in equation.operands))
            if given != tuple(avals[name] for name in equation.results):
                had = ", ".join(str(avals[name]) for name in equation.results)
                raise StepError(f"'{equation}': must give {had}, as its parts: got {', '.join(map(str, given))}")
        made = evolve(self, equations=equations)
        names = [put.name for put in self.inputs] + [name for one in equations for name in one.results]
        object.__setattr__(made, "_avals", {name: avals[name] for name in names})
        return made

    def __str__(self) -> str:
        found, lines, scope = self.avals(), [f"{{ {self.name}"], ""
        lines += [f"    {put}" for put in self.inputs]
        lines.append("  let")
        for equation in self.equations:
            if equation.tag != scope:
                scope = equation.tag
                lines.append(f"    # {scope}".rstrip())
            typed = tuple(f"{name}: {found[name]}" for name in equation.results)
            lines.append(f"    {call(evolve(equation, results=typed))}")
        return "\n".join([*lines, f"  in {' '.join(self.outputs)} }}"])


def avals_of(inputs: Iterable[Input], equations: Iterable[Applied]) -> dict[str, Aval]:
    """Shape and dtype of every value, by the shape rules; raises `ShapeError` or `KeyError`."""
    found = {put.name: put.aval for put in inputs}
    for equation in equations:
        results = equation.op.infer(*(found[name] for name in equation.operands))
        found.update(zip(equation.results, results, strict=True))
    return found


# --- tracing -----------------------------------------------------------------


@frozen(eq=False, repr=False)
class Value:
    """A tensor to be: an input of the function that is traced, or a result of an op.  Compared by identity."""

    aval: Aval
    name: str
    trace: "Trace"
    place: Place = "device"

    def __repr__(self) -> str:
        return f"{self.name}: {self.aval}"


@define
class Names:
    """Names that are taken."""

    taken: set[str]
    count: dict[str, int] = field(factory=lambda: defaultdict(int))

    def unused(self, name: str) -> str:
        """`name`, with a number where it is taken; it is taken from now on."""
        found = name
        while found in self.taken:
            self.count[name] += 1
            found = f"{name}_{self.count[name]}"
        self.taken.add(found)
        return found


@frozen(eq=False)
class _Bound:
    """An op with its operands and results while a function is traced."""

    op: Op
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    tag: str


@frozen(eq=False)
class Trace:
    """What has been written so far, in order."""

    written: list[_Bound] = field(factory=list)


_SCOPE: ContextVar[tuple[str, ...]] = ContextVar("scope", default=())


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Tag what is bound inside, as in `with scope("attention"):`; scopes nest, and join with a dot."""
    if not isinstance(name, str) or not re.fullmatch(r"\w+(\.\w+)*", name):
        raise InputError(f"scope: must be words joined by dots: got {name!r}")
    token = _SCOPE.set((*_SCOPE.get(), name))
    try:
        yield
    finally:
        _SCOPE.reset(token)


def bind(op: Op, *operands: Value, names: tuple[str, ...] | None = None) -> tuple[Value, ...]:
    """Write down `op` applied to `operands`; nothing runs.

    `names` are the names the results get in a listing (made unique there);
    by default those the op declares.  Raises `ShapeError`.
    """
    for value in operands:
        if not isinstance(value, Value):
            raise TypeError(f"{op.name}: every operand must be a Value: got {type(value).__name__}")
    avals = op.infer(*(value.aval for value in operands))
    on_host = op.on_host()
    for position, (value, name) in enumerate(zip(operands, op.operands, strict=True)):
        if (position in on_host) != (value.place == "host"):
            where = "on the host" if position in on_host else "on the device"
            raise ShapeError(f"{op.name}: {name} must be {where}: got {value.name}, which is not")
    trace = operands[0].trace
    if any(value.trace is not trace for value in operands):
        raise StepError(f"{op.name}: every operand must come from one trace: got values of several")
    named = op.results if names is None else names
    if len(named) != len(avals):
        raise StepError(f"{op.name}: names: must be {len(avals)}, one for each result: got {len(named)}")
    results = tuple(Value(aval, name, trace) for aval, name in zip(avals, named, strict=True))
    trace.written.append(_Bound(op, operands, results, ".".join(_SCOPE.get())))
    return results


@frozen
class _Leaf:
    aval: Aval
    place: Place = "device"
    role: Role = "data"


def staged(aval: Aval) -> Any:
    """An input that comes on the host, where its values are checked, and is sent to the device by every step."""
    return _Leaf(aval, place="staged")


def on_host(aval: Aval) -> Any:
    """An input that stays on the host: a tuple of Python integers."""
    return _Leaf(aval, place="host")


def parameters(tree: Any) -> Any:
    """Mark a pytree of avals as parameters, which a backend prepares once."""
    return pytree.tree_map(lambda aval: _Leaf(aval, role="parameter"), tree)


def trace(function: Callable[..., Any], title: str = "", /, **arguments: Any) -> Step:
    """The step of a function of values: called once, with a value for every leaf of its arguments.

    Arguments are pytrees of avals, as they are or marked by `staged`, `on_host` and `parameters`; what the step
    writes is a state.  What no output needs is left out; an op without
    results is there for its effect and stays.

    >>> from mla_fx.effects import ops
    >>> x = Aval((4, 64), "bf16")
    >>> print(trace(lambda x, y: bind(ops.Add(), x, y)[0], "sum", x=x, y=x))
    { sum
        x: bf16[4, 64]
        y: bf16[4, 64]
      let
        out: bf16[4, 64] = add x y
      in out }
    """
    made = Trace()
    inputs, trees = _inputs(made, arguments)
    outside = _SCOPE.set(())  # a step has its own scopes, wherever it is traced
    try:
        outputs, packing = pytree.tree_flatten(function(**trees))
    finally:
        _SCOPE.reset(outside)
    for value in outputs:
        if not isinstance(value, Value) or value.trace is not made:
            raise StepError(f"outputs: each must be a value of this trace: got {value!r}")
    needed = _needed(made.written, outputs)
    names = _names(inputs, needed)
    equations = tuple(
        Equation(b.op, tuple(names[v] for v in b.operands), tuple(names[v] for v in b.results), b.tag) for b in needed
    )
    put = _with_states(tuple(inputs.values()), equations)
    return Step(title or function.__name__, put, equations, tuple(names[v] for v in outputs), packing)


def _inputs(made: Trace, arguments: Mapping[str, Any]) -> tuple[dict[Value, Input], dict[str, Any]]:
    """An input for every leaf of the arguments, by its value; and the arguments with values as leaves."""
    inputs: dict[Value, Input] = {}
    trees: dict[str, Any] = {}
    names = Names(set())
    for argument, tree in arguments.items():
        leaves, spec = pytree.tree_flatten_with_path(tree)
        values = []
        for path, leaf in leaves:
            leaf = leaf if isinstance(leaf, _Leaf) else _Leaf(leaf)
            name = argument + pytree.keystr(path)
            if not isinstance(leaf.aval, Aval):
                raise StepError(f"{name}: each leaf must be an Aval, as it is or marked: got {leaf.aval!r}")
            name = names.unused(name)  # paths differ, but two may be spelt alike
            values.append(Value(leaf.aval, name, made, leaf.place))
            inputs[values[-1]] = Input(name, leaf.aval, leaf.place, leaf.role, (argument, *path))
        trees[argument] = pytree.tree_unflatten(values, spec)
    return inputs, trees


def _needed(written: list[_Bound], outputs: list[Value]) -> list[_Bound]:
    """What the outputs follow from, and what is there for its effect: what has no result."""
    alive, found = set(outputs), []
    for bound in reversed(written):
        if not bound.results or not alive.isdisjoint(bound.results):
            alive.update(bound.operands)
            found.append(bound)
    return found[::-1]


def _names(inputs: Mapping[Value, Input], needed: list[_Bound]) -> dict[Value, str]:
    """A name for every value: the one it asks for, with a number where it is taken."""
    names = {value: put.name for value, put in inputs.items()}
    free = Names({*names.values(), *(put.path[0] for put in inputs.values())})
    for bound in needed:
        names.update((value, free.unused(value.name)) for value in bound.results)
    return names


def _with_states(inputs: tuple[Input, ...], equations: Iterable[Equation]) -> tuple[Input, ...]:
    """The inputs that an equation writes are states; a parameter may not be one, nor a copy that a step is sent."""
    root = memory_of((put.name for put in inputs), equations)
    written = {root[e.operands[position]] for e in equations for position in e.op.written()}
    for put in inputs:
        if put.name in written and put.role == "parameter":
            raise StepError(f"{put.name}: a parameter must not be written: it is prepared once for many steps")
        if put.name in written and put.place == "staged":
            raise StepError(f"{put.name}: what is staged must not be written: it is sent anew by every step")
    return tuple(evolve(put, role="state") if put.name in written else put for put in inputs)


def memory_of(inputs: Iterable[str], equations: Iterable[Applied]) -> dict[str, str]:
    """For every value, the value in whose memory it lies: an op returns a state that it writes, and what it gives a
    view of, in the same memory."""
    root = {name: name for name in inputs}
    for equation in equations:
        op, operands, results = equation.op, equation.operands, equation.results
        for name in results:
            root[name] = name
        for position, result in op.written().items():
            root[results[result]] = root[operands[position]]
        for result, position in op.viewed().items():
            root[results[result]] = root[operands[position]]
    return root


def versions_of(inputs: Iterable[str], equations: Iterable[Applied]) -> dict[str, str]:
    """For every value, the value whose content it shows: itself, or for a view what it is a view of."""
    shown = {name: name for name in inputs}
    for equation in equations:
        shown.update((name, name) for name in equation.results)
        for result, position in equation.op.viewed().items():
            shown[equation.results[result]] = shown[equation.operands[position]]
    return shown
