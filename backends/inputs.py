"""What goes into a compiled program: arguments are loaded, and refused, before anything runs.

An input's name is its path: `batch.slots` is attribute `slots` of argument
`batch`.  Every argument is a sequence with one tree for each rank that this
process runs.  Loading is generated once per program, as straight-line code.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from mla_fx.dtypes import DTYPES as DTYPES
from mla_fx.effects import Aval, Input, InputError, Launch, Op, Program
from mla_fx.effects.aval import FLOATS

#: What a program takes on the host whatever its device, since values decide whether a step can run.
ON_HOST = (torch.int32, torch.int64)
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PATH = re.compile(r"(?P<argument>[A-Za-z_]\w*)(?P<rest>(\.[A-Za-z_]\w*|\[\d+\]|\['[^'\\]*'\])*)")

#: Arguments to a flat tuple of leaves, input after input, rank after rank.
Load = Callable[..., tuple[Any, ...]]


def split(name: str) -> tuple[str, str]:
    """The argument and the path inside it: `cache[0].latent` -> (`cache`, `[0].latent`)."""
    found = _PATH.fullmatch(name)
    if found is None:
        raise InputError(f"input name: must be a word, then attributes or indices, as in cache[0].latent: got {name!r}")
    return found["argument"], found["rest"]


def arguments_of(program: Program) -> tuple[str, ...]:
    """Names of the arguments of a compiled program, in order."""
    return tuple(dict.fromkeys(split(i.name)[0] for i in program.inputs))


def loader(program: Program, ranks: range) -> Load:
    """Generate the function that loads, checks and flattens the arguments for those `ranks` that run here."""
    arguments = arguments_of(program)
    states = program.states()
    scope: dict[str, Any] = {
        "torch": torch,
        "wrong": _wrong,
        "apart": _apart,
        "explain": partial(_explain, program, ranks),
    }
    lines = [f"def load({', '.join(arguments)}):", "    try:"]
    for argument in arguments:
        lines.append(f"        if len({argument}) != {len(ranks)}: raise TypeError")
    leaves = [(i, rank, f"x{number}_{rank}") for number, i in enumerate(program.inputs) for rank in ranks]
    for put, rank, leaf in leaves:
        argument, rest = split(put.name)
        lines.append(f"        {leaf} = {argument}[{ranks.index(rank)}]{rest}")
    for number, (put, rank, leaf) in enumerate(leaves):
        scope[f"i{number}"] = put
        lines.append(f"        if {_refused(put, leaf, put.name in states)}: wrong(i{number}, {rank}, {leaf})")
    lines += [
        "    except (AttributeError, IndexError, KeyError, TypeError):",
        f"        explain({', '.join(arguments)})",
        "        raise",
    ]
    by_rank = {(put.name, rank): leaf for put, rank, leaf in leaves}
    for number, (rule, launch) in enumerate(_value_rules(program)):
        scope[f"r{number}"] = rule
        for rank in ranks:
            host = {n: (by_rank[s, rank], "" if aval.dtype == "host" else ".numpy()") for n, s, aval in launch}
            values = [f"{name!r}: {leaf}{view}" for name, (leaf, view) in host.items()]
            # What the ranks share, as they do lengths and tables, is looked at once.
            others = [] if rank == ranks[0] else launch
            news = [f"{by_rank[s, rank]} is not {by_rank[s, ranks[0]]}" for _, s, _ in others] or ["True"]
            lines.append(f"    if {' or '.join(news)}: r{number}({rank}, {{{', '.join(values)}}})")
    for name in states:
        shared = [by_rank[name, rank] for rank in ranks]
        lines.append(f"    apart({name!r}, {', '.join(shared)})")
    lines.append(f"    return ({''.join(f'{leaf}, ' for _, _, leaf in leaves)})")
    exec(compile("\n".join(lines), f"<inputs of {program.name}>", "exec"), scope)
    load: Load = scope["load"]
    return load


def _refused(put: Input, leaf: str, state: bool) -> str:
    if put.aval.dtype == "host":
        return f"type({leaf}) is not tuple or len({leaf}) != {put.aval.shape[0]}"
    wrong = f"{leaf}.shape != {put.aval.shape} or {leaf}.dtype is not {DTYPES[put.aval.dtype]}"
    if DTYPES[put.aval.dtype] in ON_HOST:
        wrong += f" or {leaf}.device.type != 'cpu'"
    return f"{wrong} or not {leaf}.is_contiguous()" if state else wrong


def _wrong(put: Input, rank: int, leaf: Any) -> None:
    """Word the refusal of one leaf."""
    where = f"{put.name} of rank {rank}"
    if put.aval.dtype == "host":
        raise InputError(f"{where}: must be a tuple of {put.aval.shape[0]} integers: got {leaf!r}")
    if not isinstance(leaf, torch.Tensor):
        raise InputError(f"{where}: must be a tensor {put.aval}: got {type(leaf).__name__}")
    dtype = _NAMES.get(leaf.dtype, str(leaf.dtype).removeprefix("torch."))
    if dtype != put.aval.dtype:
        raise InputError(f"{where}: must have dtype {put.aval.dtype}: got {dtype}")
    if tuple(leaf.shape) != put.aval.shape:
        raise InputError(f"{where}: must have shape {put.aval.shape}: got {tuple(leaf.shape)}")
    if DTYPES[put.aval.dtype] in ON_HOST and leaf.device.type != "cpu":
        raise InputError(f"{where}: is checked by value and must be on the host: got device {leaf.device}")
    raise InputError(f"{where}: is updated in place and must be contiguous: got strides {leaf.stride()}")


def _explain(program: Program, ranks: range, *arguments: Any) -> None:
    """Find out what is wrong with the structure of the arguments."""
    given = dict(zip(arguments_of(program), arguments, strict=True))
    for name, argument in given.items():
        if not isinstance(argument, Sequence) or len(argument) != len(ranks):
            size = f" of {len(argument)}" if hasattr(argument, "__len__") else ""
            raise InputError(
                f"{name}: must be a sequence with one entry for each of {len(ranks)} ranks: "
                f"got {type(argument).__name__}{size}"
            )
    for put in program.inputs:
        name, rest = split(put.name)
        for rank in ranks:
            try:
                leaf = eval(f"tree{rest}", {"tree": given[name][ranks.index(rank)]})
            except (AttributeError, IndexError, KeyError, TypeError) as error:
                raise InputError(f"{name} of rank {rank}: must have {rest}, {put.aval}: got {error}") from None
            if put.aval.dtype != "host" and not isinstance(leaf, torch.Tensor):
                _wrong(put, rank, leaf)


def _apart(name: str, *tensors: torch.Tensor) -> None:
    """Ranks own their states: two ranks in one memory would overwrite each other."""
    places = [t.data_ptr() for t in tensors if t.numel()]
    if len(set(places)) < len(places):
        raise InputError(f"{name}: every rank must have a state of its own: got one tensor for several ranks")


_Integers = list[tuple[str, str, Aval]]  # operand of the op, input of the program, aval


def _value_rules(program: Program) -> list[tuple[Callable[..., None], _Integers]]:
    """The value checks that inputs alone decide, each once however many launches ask for it."""
    inputs = {i.name: i.aval for i in program.inputs}
    avals = program.avals()
    found: dict[Any, tuple[Callable[..., None], _Integers]] = {}
    for launch in program.launches:
        if type(launch.op).value_rule is Op.value_rule:
            continue
        named = list(zip(launch.op.operands, launch.operands, strict=True))
        integers = [(name, source, avals[source]) for name, source in named if avals[source].dtype not in FLOATS]
        if all(source in inputs for _, source, _ in integers):
            shapes = {name: avals[source] for name, source in named}
            key = (type(launch.op), *shapes.values(), *integers)
            found.setdefault(key, (partial(_value_rule, launch, shapes), integers))
    return list(found.values())


def _value_rule(launch: Launch, avals: dict[str, Aval], rank: int, values: dict[str, Any]) -> None:
    try:
        launch.op.value_rule(avals, values)
    except InputError as error:
        raise InputError(f"rank {rank}, {launch.op.name}: {error}") from None
