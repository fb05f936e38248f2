"""What goes into a compiled program: arguments are taken apart, and refused, before anything runs.

Every argument is a sequence with one tree for each rank that this process
runs; an input's path says where in it the leaf lies.  Parameters come once, by
`Prepared`; what comes with every step is checked with every step.

Only plain tensors with memory of their own can be run on: a fake one, one of a
transform of `torch.func`, or one on the meta device has no data to work on.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import torch
import torch.utils._pytree as pytree
from attrs import field, frozen

from mla_fx.backends.overlap import Overlaps
from mla_fx.backends.table import Formed
from mla_fx.dtypes import DTYPES
from mla_fx.effects import Aval, Input, InputError, Launch, Op, Program
from mla_fx.effects.aval import FLOATS

#: Dtype to the name that abstract values use.
NAMES = {dtype: name for name, dtype in DTYPES.items()}

Getter = Callable[[Any], Any]


def arguments_of(inputs: Iterable[Input]) -> tuple[str, ...]:
    """Names of the arguments that inputs come in, in order."""
    return tuple(dict.fromkeys(put.path[0] for put in inputs))


@frozen(eq=False)
class _Node:
    """How to reach the inputs below: `children` gives those of a tree, each a leaf (its node None) or gone on from.

    `below` is None where all are leaves; `order` has the numbers of the inputs, in the order in which they are found.
    """

    children: Callable[[Any], Sequence[Any]]
    below: "tuple[_Node | None, ...] | None"
    order: tuple[int, ...]

    @classmethod
    def of(cls, paths: Mapping[int, tuple[Any, ...]]) -> "_Node | None":
        """Paths that share their beginning share the way; None for a path of nothing."""
        if list(paths.values()) == [()]:
            return None
        groups: dict[Any, dict[int, tuple[Any, ...]]] = {}
        for number, path in paths.items():
            groups.setdefault(path[0], {})[number] = path[1:]
        below = tuple(cls.of(rests) for rests in groups.values())
        order = [number for rests, node in zip(groups.values(), below, strict=True) for number in _order(rests, node)]
        return cls(_children(list(groups)), below if any(below) else None, tuple(order))

    def collect(self, tree: Any, into: list[Any]) -> None:
        """Append the leaves of a tree."""
        if self.below is None:
            into += self.children(tree)
            return
        for child, node in zip(self.children(tree), self.below, strict=True):
            if node is None:
                into.append(child)
            else:
                node.collect(child, into)


def _order(paths: Mapping[int, tuple[Any, ...]], node: _Node | None) -> tuple[int, ...]:
    return tuple(paths) if node is None else node.order


def _children(keys: Sequence[Any]) -> Callable[[Any], Sequence[Any]]:
    """What gets the children at these keys, in one call where their kind allows."""
    getters = [_getter(key) for key in keys]
    if len(keys) > 1 and all(isinstance(key, pytree.GetAttrKey) for key in keys):
        several: Getter = attrgetter(*(key.name for key in keys))
        return several
    if len(keys) > 1 and all(isinstance(key, pytree.SequenceKey) for key in keys):
        several = itemgetter(*(key.idx for key in keys))
        return several
    return lambda tree: [get(tree) for get in getters]


def _getter(key: Any) -> Getter:
    match key:
        case pytree.GetAttrKey(name=name):
            return attrgetter(name)
        case pytree.SequenceKey(idx=index):
            return itemgetter(index)
        case pytree.MappingKey(key=name):
            return itemgetter(name)
    raise TypeError(f"a path is made of pytree keys: got {key!r}")


#: What a tree that is not the one asked for answers with.
_MISSING = (AttributeError, IndexError, KeyError, TypeError)


@frozen(eq=False)
class Leaves:
    """Takes arguments apart: leaves, input after input, and of each rank after rank."""

    inputs: tuple[Input, ...]
    ranks: range
    arguments: tuple[str, ...] = field(init=False)
    _nodes: tuple[_Node | None, ...] = field(init=False)  # of each argument; None: it is a leaf itself
    _sorted: Callable[[list[Any]], Sequence[Any]] | None = field(init=False)  # where inputs are in another order

    def __attrs_post_init__(self) -> None:
        names = arguments_of(self.inputs)
        nodes: list[_Node | None] = []
        order: list[int] = []
        for name in names:
            paths = {number: put.path[1:] for number, put in enumerate(self.inputs) if put.path[0] == name}
            nodes.append(_Node.of(paths))
            order += _order(paths, nodes[-1])
        at = sorted(range(len(order)), key=order.__getitem__)
        object.__setattr__(self, "arguments", names)
        object.__setattr__(self, "_nodes", tuple(nodes))
        object.__setattr__(self, "_sorted", None if at == list(range(len(at))) else itemgetter(*at))

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        """The leaves; raises `InputError` naming the argument and the path."""
        if len(arguments) != len(self.arguments):
            raise InputError(
                f"arguments: must be {', '.join(self.arguments) or 'none'}, {len(self.arguments)} of them: "
                f"got {len(arguments)}"
            )
        by_rank: list[list[Any]] = [[] for _ in self.ranks]
        try:
            for argument, node in zip(arguments, self._nodes, strict=True):
                if isinstance(argument, torch.Tensor) or len(argument) != len(by_rank):
                    raise TypeError
                for leaves, tree in zip(by_rank, argument, strict=True):
                    if node is None:
                        leaves.append(tree)
                    else:
                        node.collect(tree, leaves)
        except _MISSING:
            self._explain(arguments)
            raise
        if self._sorted is not None:
            by_rank = [list(self._sorted(leaves)) for leaves in by_rank]
        if len(by_rank) == 1:
            return by_rank[0]
        return [leaf for of_ranks in zip(*by_rank, strict=True) for leaf in of_ranks]

    def _explain(self, arguments: Sequence[Any]) -> None:
        """Find out what is wrong with the structure of the arguments."""
        given = dict(zip(self.arguments, arguments, strict=True))
        for name, argument in given.items():
            if not isinstance(argument, Sequence) or len(argument) != len(self.ranks):
                size = f" of {len(argument)}" if isinstance(argument, Sequence) else ""
                raise InputError(
                    f"{name}: must be a sequence with one entry for each of {len(self.ranks)} ranks: "
                    f"got {type(argument).__name__}{size}"
                )
        for put in self.inputs:
            name, path = put.path[0], put.path[1:]
            for rank, tree in zip(self.ranks, given[name], strict=True):
                try:
                    for key in path:
                        tree = _getter(key)(tree)
                except _MISSING as error:
                    where = f"{name} of rank {rank}"
                    raise InputError(f"{where}: must have {pytree.keystr(path)}, {put.aval}: got {error}") from None


# --- leaves ------------------------------------------------------------------


@frozen(eq=False)
class Loader:
    """Arguments of a run to checked leaves; `rows` has each input with what is asked of its leaves."""

    leaves: Leaves
    device: str
    rows: tuple[tuple[int, Input, tuple[int, ...], torch.dtype, str, bool, bool], ...]
    values: "Values"
    overlaps: Overlaps

    @classmethod
    def of(cls, program: Program, ranks: range, device: str, parameters: Mapping[str, Sequence[Formed]]) -> "Loader":
        """The loader of a program's inputs, all but its parameters; `device` is the kind that tensors must be on."""
        inputs = tuple(put for put in program.inputs if put.role != "parameter")
        states = set(program.states())
        rows = tuple(
            (
                number * len(ranks),
                put,
                put.aval.shape,
                DTYPES[put.aval.dtype],
                "cpu" if put.place == "staged" else device,
                put.place == "host",
                put.name in states,
            )
            for number, put in enumerate(inputs)
        )
        overlaps = Overlaps(inputs, states, ranks, device, parameters)
        return cls(Leaves(inputs, ranks), device, rows, Values(program, inputs, ranks), overlaps)

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        """The leaves, input after input; raises `InputError` before anything has run."""
        found = self.leaves(arguments)
        ranks = self.leaves.ranks
        same = self.overlaps.same(found)
        for at, put, shape, dtype, device, host, state in self.rows:
            if state and same:
                continue  # as they were found in the step before
            before = None
            for rank, leaf in zip(ranks, found[at : at + len(ranks)], strict=True):
                if leaf is before:
                    continue  # what ranks share, as they do hidden states and tables, is looked at once
                before = leaf
                if not host:
                    fits = (
                        type(leaf) in _PLAIN
                        and leaf.dtype is dtype
                        and leaf.shape == shape
                        and (leaf.is_cpu if device == "cpu" else leaf.device.type == device)
                        and leaf.layout is _STRIDED
                        and (not state or leaf.is_contiguous())
                    )
                else:  # `bool` and the integers of NumPy are of other types; operators may take neither
                    fits = type(leaf) is tuple and len(leaf) == shape[0] and _INTEGERS.issuperset(map(type, leaf))
                    fits = fits and put.fixed in (None, leaf)
                if not fits:
                    refuse(put, f"{put.name} of rank {rank}", leaf, device)
        self.values.check(found)
        self.overlaps.check(found, same)
        return found


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_STRIDED = torch.strided
_INTEGERS = frozenset((int,))


def refuse(put: Input, where: str, leaf: Any, device: str) -> None:
    """Word the refusal of one leaf; `device` is where it should be."""
    if put.fixed is not None and type(leaf) is tuple:
        raise InputError(f"{where}: must be {put.fixed}, for which the program is made: got {leaf}")
    if put.place == "host":
        raise InputError(f"{where}: must be a tuple of {put.aval.shape[0]} integers: got {leaf!r}")
    if not isinstance(leaf, torch.Tensor):
        raise InputError(f"{where}: must be a tensor {put.aval}: got {type(leaf).__name__}")
    if type(leaf) not in _PLAIN or leaf.layout is not torch.strided:
        got = leaf.layout if type(leaf) in _PLAIN else type(leaf).__name__
        raise InputError(f"{where}: must be a plain tensor, since a program writes and reads memory: got {got}")
    dtype = NAMES.get(leaf.dtype, str(leaf.dtype).removeprefix("torch."))
    if dtype != put.aval.dtype:
        raise InputError(f"{where}: must have dtype {put.aval.dtype}: got {dtype}")
    if tuple(leaf.shape) != put.aval.shape:
        raise InputError(f"{where}: must have shape {put.aval.shape}: got {tuple(leaf.shape)}")
    if leaf.device.type != device:
        why = "is checked by value and sent by the step, so it must be on the host" if put.place == "staged" else ""
        raise InputError(f"{where}: {why or f'must be on {device}, as Backend.put moves it'}: got {leaf.device}")
    raise InputError(f"{where}: is updated in place and must be contiguous: got strides {leaf.stride()}")


# --- values ------------------------------------------------------------------


class Values:
    """The value checks that inputs from the host alone decide, each once however many launches ask for it."""

    def __init__(self, program: Program, inputs: Sequence[Input], ranks: range) -> None:
        number = {put.name: index for index, put in enumerate(inputs) if put.place != "device"}
        avals = program.avals()
        found: dict[Any, tuple[Launch, Mapping[str, Aval], list[tuple[str, int]]]] = {}
        for launch in program.launches:
            if type(launch.op).value_rule is Op.value_rule:
                continue
            named = list(zip(launch.op.operands, launch.operands, strict=True))
            integers = [(name, source) for name, source in named if avals[source].dtype not in FLOATS]
            if all(source in number for _, source in integers):
                shapes = {name: avals[source] for name, source in named}
                places = [(name, number[source] * len(ranks)) for name, source in integers]
                rows = [aval.shape[:-1] if aval.dtype in FLOATS else aval.shape for aval in shapes.values()]
                found.setdefault((launch.op, *rows, *integers), (launch, shapes, places))
        self.ranks = ranks
        self.checks = list(found.values())
        self.sources = sorted({place for *_, places in self.checks for _, place in places})

    def check(self, leaves: Sequence[Any]) -> None:
        """Ask the ops of every rank's values; what ranks share, as they do lengths and tables, is looked at once."""
        count = len(self.ranks)
        values = {}
        for source in self.sources:
            first = leaves[source]
            values[source] = value = first if type(first) is tuple else first.numpy()
            for place in range(source + 1, source + count):
                leaf = leaves[place]
                values[place] = value if leaf is first else leaf if type(leaf) is tuple else leaf.numpy()
        for launch, avals, places in self.checks:
            rule = launch.op.value_rule
            for k in range(count):
                if k and all([values[place + k] is values[place] for _, place in places]):
                    continue
                try:
                    rule(avals, {name: values[place + k] for name, place in places})
                except InputError as error:
                    raise InputError(f"rank {self.ranks[k]}, {launch.op.name}: {error}") from None
