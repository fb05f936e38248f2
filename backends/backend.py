"""A backend: a table from op to rule, and which ranks this process runs: all of a group, or one.

`compile` gives straight-line code: a program whose every effect has been
turned into a bound call, with nothing left to interpret.  In one process on
the CPU, streams and events cost nothing (issue order is one of the legal
orders), a launch is a call for each rank, a collective one call for all, and a
drop lets go of the tensors.  On a device with streams every effect is a call:
see `mla_fx.backends.torch_streams`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Any, TypeVar

import attrs
import torch
import torch.utils._pytree as pytree
from attrs import evolve, frozen

from mla_fx.backends.inputs import DTYPES, ON_HOST, Load, loader
from mla_fx.effects import Drop, InputError, Launch, Op, Program, check, ops
from mla_fx.effects.op import stem

#: `rule(*operands, **params) -> results`, always a tuple.  A collective is called once for all ranks:
#: `rule([operands of rank 0, ...], **params) -> [results of rank 0, ...]`.
#: On a device with streams a collective's rule is a generator, and what an op `uses` is passed by its name
#: (see `mla_fx.backends.torch_streams`).  In a group of processes a collective's rule is one like any other, for
#: this rank alone, and gets the `group` (see `mla_fx.backends.distributed`).
Rule = Callable[..., Any]
Tree = TypeVar("Tree")


def rules_of(package: str, wanted: Iterable[type[Op]] = ops.ALL) -> Mapping[type[Op], Rule]:
    """A backend's table: the rule of every op is `rule` in the package's module of the op's stem."""
    return MappingProxyType({op: import_module(f"{package}.{stem(op)}").rule for op in wanted})


class MissingRuleError(LookupError):
    """A backend has no rule for an op of the program."""


@frozen
class Backend:
    """How programs run.  `backends.get` makes one; one of your own is another table.

    `ranks` is the size of the group.  All its ranks run in this process,
    unless `group` is a group of `torch.distributed` with as many: then this
    process runs its own rank of it, and arguments and results have one entry.
    `dtype` replaces the floating dtype of every program (the reference
    computes in "fp64"); None leaves programs as they are.  `adversary` is the
    seed of an adversarial run (see `mla_fx.backends.adversary`), None for a plain one.
    `device` is the torch device whose streams run programs ("npu"), None for the host.
    """

    name: str
    rules: Mapping[type[Op], Rule]
    ranks: int = 1
    dtype: str | None = None
    adversary: int | None = None
    device: str | None = None
    group: Any = None

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.ranks, int) or self.ranks < 1:
            raise InputError(f"ranks: must be an integer of at least 1: got {self.ranks!r}")
        if self.device and self.adversary is not None:
            raise InputError(f"adversary: a run on {self.device} has none: got seed {self.adversary}")
        if self.group is not None:
            if self.adversary is not None:
                raise InputError(f"adversary: it plays all ranks, a group of processes has none: got {self.adversary}")
            size, rank = torch.distributed.get_world_size(self.group), torch.distributed.get_rank(self.group)
            if rank < 0:
                raise InputError("group: this process must be a rank of it: got one of others")
            if size != self.ranks:
                raise InputError(f"ranks: must be the size of the group, {size}: got {self.ranks}")

    @property
    def here(self) -> range:
        """The ranks that this process runs."""
        if self.group is None:
            return range(self.ranks)
        rank = torch.distributed.get_rank(self.group)
        return range(rank, rank + 1)

    def with_rules(self, rules: Mapping[type[Op], Rule]) -> "Backend":
        """This backend with rules added or replaced."""
        return evolve(self, rules={**self.rules, **rules})

    def put(self, tree: Tree, *, copy: bool = False) -> Tree:
        """A pytree of tensors as this backend takes it: floats in its dtype, and on its device.

        Lengths, slots, tables and tokens stay on the host: a run checks their values.

        `copy`: never share memory with `tree` (a cache, say, that two backends will update).
        """

        def move(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if leaf.dtype in ON_HOST:
                return leaf.to(leaf.dtype, copy=copy)
            wanted = DTYPES[self.dtype] if self.dtype and leaf.is_floating_point() else leaf.dtype
            return leaf.to(self.device or leaf.device, wanted, copy=copy)

        moved: Tree = pytree.tree_map(move, tree)
        return moved

    def compile(self, program: Program, *, unchecked: bool = False) -> "Executable":
        """Turn a program into a function; raises `LawError` for an illegal one, `MissingRuleError`.

        The function takes the program's arguments, each a sequence with one
        tree for each rank that runs here, and returns what the step returns,
        each top-level entry a list over these ranks.  States are updated in place.  `unchecked`
        skips the law, to see what a race does.
        """
        if self.dtype:
            program = program.with_float(self.dtype)
        if not unchecked:
            check(program)
        for launch in program.launches:
            if type(launch.op) not in self.rules:
                raise MissingRuleError(
                    f"backend {self.name} has no rule for {launch.op.name} ({type(launch.op).__name__})"
                )
            if getattr(launch.op, "ranks", self.ranks) != self.ranks:
                raise InputError(
                    f"ranks: the program's {launch.op.name} is for a group of {launch.op.ranks}: "  # type: ignore[attr-defined]
                    f"got a backend of {self.ranks}"
                )
        body: Callable[..., tuple[Any, ...]]
        if self.device:
            from mla_fx.backends.torch_streams import on_streams  # which needs this module

            body, source = on_streams(program, self, self.device)
        elif self.adversary is None:
            body, source = straight_line(program, self)
        else:
            from mla_fx.backends.adversary import Adversary  # which needs this module

            body, source = Adversary(program, self, seed=self.adversary, legal=not unchecked), ""
        return Executable(program, source, loader(program, self.here), body, packer(program, len(self.here)))

    def bound(self, launch: Launch, rank: int | None = None) -> Rule:
        """The rule of a launch with the parameters of its op, its rank where it needs one, and a collective's group."""
        params = {a.name: getattr(launch.op, a.name) for a in attrs.fields(type(launch.op))}
        if launch.op.needs_rank:
            params["rank"] = rank
        if launch.op.communicates and self.group is not None:
            params["group"] = self.group
        return partial(self.rules[type(launch.op)], **params) if params else self.rules[type(launch.op)]


@frozen(eq=False)
class Executable:
    """A compiled program.  `source` is the code it runs (empty for an adversarial run)."""

    program: Program
    source: str
    load: Load
    body: Callable[..., tuple[Any, ...]]
    pack: Callable[[tuple[Any, ...]], Any]

    def __call__(self, *arguments: Any) -> Any:
        """Run one step; raises `InputError` before anything has run."""
        leaves = self.load(*arguments)
        with torch.no_grad():
            return self.pack(self.body(*leaves))


def straight_line(program: Program, backend: Backend) -> tuple[Callable[..., tuple[Any, ...]], str]:
    """The body of a program as generated Python: flat inputs to flat outputs, rank after rank."""
    ranks = backend.here
    scope: dict[str, Any] = {}
    names = {i.name: f"x{number}" for number, i in enumerate(program.inputs)}
    arguments = ", ".join(f"{names[i.name]}_{rank}" for i in program.inputs for rank in ranks)
    lines = [f"def body({arguments}):"]
    for effect in program.effects:
        match effect:
            case Launch():
                names.update({name: f"v{len(names) + k}" for k, name in enumerate(effect.results)})
                lines += _call(effect, names, backend, scope)
            case Drop():
                lines.append(f"    del {', '.join(f'{names[effect.value]}_{rank}' for rank in ranks)}")
            case _:
                pass  # one thread runs in issue order, which is a legal order: nothing to wait for
    outputs = "".join(f"{names[name]}_{rank}, " for name in program.outputs for rank in ranks)
    lines.append(f"    return ({outputs})")
    source = "\n".join(lines)
    exec(compile(source, f"<{program.name}>", "exec"), scope)
    return scope["body"], source


def _call(launch: Launch, names: Mapping[str, str], backend: Backend, scope: dict[str, Any]) -> list[str]:
    ranks = backend.here
    operands = [", ".join(f"{names[name]}_{rank}" for name in launch.operands) for rank in ranks]
    results = ["".join(f"{names[name]}_{rank}, " for name in launch.results) for rank in ranks]
    function = f"{launch.op.name}_{len(scope)}"
    if launch.op.communicates and backend.group is None:
        scope[function] = backend.bound(launch)
        left = "".join(f"({result}), " for result in results)
        right = "".join(f"({operand},), " for operand in operands)
        return [f"    {left}= {function}([{right}])"]
    lines = []
    for rank, result, operand in zip(ranks, results, operands, strict=True):
        name = f"{function}_{rank}" if launch.op.needs_rank else function
        scope.setdefault(name, backend.bound(launch, rank))
        lines.append(f"    {result}= {name}({operand})")
    return lines


def packer(program: Program, ranks: int) -> Callable[[tuple[Any, ...]], Any]:
    """Flat outputs to what the step returns, every top-level entry a list over the ranks; generated once."""
    scope: dict[str, Any] = {}
    count, spec = len(program.outputs), program.tree
    by_rank = []
    for rank in range(ranks):
        leaves = iter([f"v{k}_{rank}" for k in range(count)])
        if spec is None:
            by_rank.append(list(leaves))
        else:
            children = spec.children() if spec.type is tuple else [spec]
            by_rank.append([_packed(child, leaves, scope) for child in children])
    lists = [f"[{', '.join(entry)}]" for entry in zip(*by_rank, strict=True)]
    single = spec is not None and spec.type is not tuple
    flat = "".join(f"v{k}_{rank}, " for k in range(count) for rank in range(ranks))
    result = lists[0] if single else f"({', '.join(lists)},)"
    lines = ["def pack(flat):", f"    ({flat}) = flat", f"    return {result}"]
    exec(compile("\n".join(lines), f"<outputs of {program.name}>", "exec"), scope)
    pack: Callable[[tuple[Any, ...]], Any] = scope["pack"]
    return pack


def _packed(spec: pytree.TreeSpec, leaves: Iterator[str], scope: dict[str, Any]) -> str:
    """The expression that builds a tree from its leaves."""
    if spec.is_leaf():
        return next(leaves)
    children = [_packed(child, leaves, scope) for child in spec.children()]
    if spec.type is list:
        return f"[{', '.join(children)}]"
    if spec.type is tuple:
        return f"({''.join(f'{child}, ' for child in children)})"
    if spec.type is dict:
        return f"{{{', '.join(f'{key!r}: {child}' for key, child in zip(spec.context, children, strict=True))}}}"
    maker = f"make{len(scope)}"
    scope[maker] = spec.context if pytree.is_namedtuple_class(spec.context) else partial(_unflatten, spec)
    return f"{maker}({', '.join(children)})"


def _unflatten(spec: pytree.TreeSpec, *children: Any) -> Any:
    """A node of a type that somebody registered with torch's pytrees."""
    return pytree.SUPPORTED_NODES[spec.type].unflatten_fn(list(children), spec.context)
