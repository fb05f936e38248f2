"""A backend: a table of rules, a world of ranks, a device.

    lower     a step into one that uses what the backend has operators for
    prepare   parameters: checked, placed, in the rules' form, once
    compile   a program into a function; what an operator cannot take is refused here

An executable belongs to its process and is not re-entrant.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from attrs import evolve, field, frozen
from torch._C._dynamo.eval_frame import set_eval_frame

from mla_fx.backends.adversary import Adversary
from mla_fx.backends.body import body_of
from mla_fx.backends.captured import Captured
from mla_fx.backends.device import HOST, Device
from mla_fx.backends.door import refuse_transforms, special
from mla_fx.backends.inputs import Loader
from mla_fx.backends.packing import packer
from mla_fx.backends.peers import Peers
from mla_fx.backends.prepared import Prepared, accept, prepare
from mla_fx.backends.rows import Body
from mla_fx.backends.table import Collective, Form, Fusion, MissingRuleError, Rule, Table, takes_any
from mla_fx.backends.world import InProcess, World
from mla_fx.dtypes import DTYPES
from mla_fx.effects import InputError, Launch, Op, Program, Step, check
from mla_fx.effects.passes import defined, definition
from mla_fx.layout import Layout

Tree = TypeVar("Tree")


def _table(given: "Table | Mapping[type[Op], Rule | Collective]") -> Table:
    return given if isinstance(given, Table) else Table(given)


@frozen(eq=False)
class Backend:
    """How programs run.  `backends.get` makes one; one of your own is another table.

    `world` says which ranks there are and which run here.  `dtype` replaces the floating dtype of every program (the
    reference computes in "fp64"); None leaves programs as they are.  `adversary` is the seed of an adversarial run
    (see `mla_fx.backends.adversary`), None for a plain one; such a run plays all ranks of a host.  `apart`: ranks of a
    process do all of their work themselves, also what is the same on others (see `mla_fx.backends.shared`), with the
    same bits.
    """

    name: str
    table: Table = field(converter=_table)
    world: World = field(factory=InProcess)
    device: Device = HOST
    dtype: str | None = None
    adversary: int | None = None
    apart: bool = False

    def __attrs_post_init__(self) -> None:
        if self.adversary is not None and (self.device.has_streams or len(self.here) != self.ranks):
            raise InputError(
                f"adversary: it plays all ranks on the host: got seed {self.adversary} for {len(self.here)} of "
                f"{self.ranks} ranks on {self.device.kind}"
            )

    @property
    def layout(self) -> Layout:
        """How the ranks of a program are laid out."""
        return self.world.layout

    @property
    def ranks(self) -> int:
        """The ranks of a program."""
        return self.layout.size

    @property
    def here(self) -> range:
        """The ranks that this process runs: arguments and results have an entry for each."""
        return self.world.here

    def share(self, value: Any) -> list[Any]:
        """What every rank says, told to all, by rank: small values on the host, that can be pickled."""
        return self.world.share(value)

    def agree(self, stated: Mapping[str, object]) -> None:
        """What is `stated`, by field, must be the same in all processes of the group, all of which come here.

        Values are compared as text, long ones by a digest.  Raises `InputError` in every process where they differ,
        with the field, what is said and by which ranks, and `PeerError` where one does not come.
        """
        if (peers := self.world.peers) is not None:
            with peers.step():
                peers.agree("agree", stated)

    def reading(self) -> AbstractContextManager[None]:
        """Where the host waits for results: an error of the transport names the rank that was lost (`PeerError`)."""
        return nullcontext() if self.world.peers is None else self.world.peers.reading()

    def with_rules(self, rules: Mapping[type[Op], Rule | Collective]) -> "Backend":
        """This backend with rules added or replaced."""
        return evolve(self, table=self.table.with_rules(rules))

    def with_fusions(self, *fusions: Fusion) -> "Backend":
        """This backend with fused ops, whose passes come behind its own."""
        return evolve(self, table=self.table.with_fusions(*fusions))

    def without_fusions(self, *fusions: Fusion) -> "Backend":
        """This backend with the passes of these fused ops left out."""
        return evolve(self, table=self.table.without_fusions(*fusions))

    def put(self, tree: Tree, *, copy: bool = False) -> Tree:
        """A pytree of tensors as this backend takes it: floats in its dtype, and on its device.

        Lengths, slots, tables and tokens stay on the host: a run checks their values and sends them.

        `copy`: never share memory with `tree` (a cache, say, that two backends will update).
        """

        def move(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if not leaf.is_floating_point():
                return leaf.to(leaf.dtype, copy=copy)
            return leaf.to(self.device.kind, DTYPES[self.dtype] if self.dtype else leaf.dtype, copy=copy)

        moved: Tree = pytree.tree_map(move, tree)
        return moved

    def lower(self, step: Step) -> Step:
        """The step after the passes of this backend's table, in order."""
        for one in self.table.passes:
            step = one(step)
        return step

    def prepare(self, described: Step | Program, *arguments: Any) -> Prepared:
        """The parameters of a step or a program: each argument a sequence with a tree for each rank that runs here.

        They are checked and placed once; every program with these parameters can be compiled with the result, that
        wants them in the forms that `described` wants: a parameter of which it wants one form alone is kept in that
        form alone.  Raises `InputError`.
        """
        forms = self._forms(described) if self.adversary is None else {}
        return prepare(
            described.inputs, arguments, ranks=self.here, device=self.device.kind, dtype=self.dtype, forms=forms
        )

    def _forms(self, described: Step | Program) -> dict[str, Form]:
        """The parameters that all of a step or a program wants in one form."""
        wanted: dict[str, set[Form | None]] = {name: {None} for name in described.outputs}
        for use in described.equations if isinstance(described, Step) else described.launches:
            for position, name in enumerate(use.operands):
                if not takes_any(use.op, position):
                    wanted.setdefault(name, set()).add(self.form(use.op, position))
        only = {name: next(iter(found)) for name, found in wanted.items() if len(found) == 1}
        return {put.name: form for put in described.inputs if put.role == "parameter" and (form := only.get(put.name))}

    def compile(
        self, program: Program, prepared: Prepared | None = None, *, unchecked: bool = False, capture: bool = False
    ) -> "Executable":
        """Turn a program into a function of its arguments, all but the parameters.

        `capture`: on a device that has graphs, one replay of a graph from the second call on, with the states of the
        first; what it gives holds until the next replay on the device (`mla_fx.backends.captured`).

        Raises `LawError` for an illegal one, `MissingRuleError` for an op without rule and definition, `InputError`
        for an op that an operator refuses and where `prepared` is not what the program asks for.  `unchecked` skips
        the law, to see what a race does.

        In a group of processes all come here for the same programs in the same order: raises `InputError` where their
        programs differ, `PeerError` where one does not come.
        """
        peers = self.world.peers
        if peers is None:
            return self._compiled(program, prepared, unchecked, capture)
        with peers.step():
            made = self._compiled(program, prepared, unchecked, capture)
            peers.agree("compile", {"program": f"{made.program}\n{made.program.inputs}"})
        collectives = tuple(launch for launch in made.program.launches if launch.op.communicates)
        return InGroup(made.program, made.load, made.body, made.pack, peers, collectives)

    def _compiled(self, program: Program, prepared: Prepared | None, unchecked: bool, capture: bool) -> "Executable":
        if self.dtype:
            program = program.with_float(self.dtype)
        if not unchecked:
            check(program)
        self._accept(program)
        accept(program.inputs, prepared, ranks=self.here, device=self.device.kind)
        body: Callable[[list[Any]], Sequence[Any]]
        if capture:
            body = Captured.of(program, self, prepared)
        elif self.adversary is None:
            body = body_of(program, self, prepared)
        else:
            body = Adversary(program, self, prepared, seed=self.adversary, legal=not unchecked)
        loader = Loader.of(program, self.here, self.device.kind, prepared.leaves if prepared else {})
        return Executable(program, loader, body, packer(program, len(self.here)))

    def _accept(self, program: Program) -> None:
        """Every op has a rule, the right group, and operands that its operator takes."""
        avals = program.avals()
        asked: set[tuple[Any, ...]] = set()
        for launch in program.launches:
            operands = tuple(avals[name] for name in launch.operands)
            if (launch.op, operands) in asked:
                continue
            asked.add((launch.op, operands))
            why = self.refusal(launch.op, *operands)
            if why is not None:
                raise InputError(f"{launch.where}: {why}")
            group = launch.op.group_of()
            if group is not None and group.size != self.layout.group(group.name).size:
                raise InputError(
                    f"{launch.where}: is for the {group.size} ranks of {group}: got a backend of {self.layout}"
                )

    def refusal(self, op: Op, *avals: Any) -> str | None:
        """Why this backend cannot run an op on such operands; None where it can."""
        if type(op) not in self.table.rules:
            if not defined(op):
                raise MissingRuleError(f"backend {self.name} has no rule for {op.name} ({type(op).__name__})")
            parts = definition(op, avals)
            found = parts.avals()
            of_parts = (self.refusal(e.op, *(found[name] for name in e.operands)) for e in parts.equations)
            return next(filter(None, of_parts), None)
        takes = self.table.takes.get(type(op))
        return takes(op, *avals) if takes else None

    def form(self, op: Op, position: int) -> Form | None:
        """The form that the rule of an op wants an operand in; None for as it is."""
        forms = self.table.forms.get(type(op))
        return forms.get(list(op.operands)[position]) if forms else None

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a backend has a device and maybe a group of its process, and cannot be pickled or copied: make backend "
            f"{self.name!r} where it is needed"
        )


@frozen(eq=False)
class Executable:
    """A compiled program: takes its arguments, each a sequence over the ranks here, and returns what the step does.

    Every top-level entry of the result is a list over these ranks.  States are updated in place.  Gradients are not
    recorded, and autocast does not reach inside.
    """

    program: Program
    load: Loader
    body: Callable[[list[Any]], Sequence[Any]]
    pack: Callable[[Sequence[Any]], Any]

    def __call__(self, *arguments: Any) -> Any:
        """Run one step; raises `InputError` before anything has run, `RunError` when a rule fails."""
        refuse_transforms()
        compiler, gradients = set_eval_frame(None), torch.is_grad_enabled()
        try:
            leaves = self.load(arguments)
            inside = special(self.load.device, inference=self.load.overlaps.inference)
            torch._C._set_grad_enabled(False)  # as torch.no_grad does, at a tenth of its cost
            if inside is None:
                return self.pack(self.body(leaves))
            with inside:
                return self.pack(self.body(leaves))
        finally:
            torch._C._set_grad_enabled(gradients)
            set_eval_frame(compiler)

    @property
    def rooms(self) -> dict[str, int]:
        """Bytes of each workspace by name: as it was captured, or as it is now where the program runs as it is."""
        if isinstance(self.body, Captured):
            return self.body.rooms
        return self.body.backend.device.rooms(self.program.workspaces()) if isinstance(self.body, Body) else {}

    # Compiled code calls this as it is, between two graphs, and what it calls in turn is not compiled either: what
    # torch.compiler.disable does, without loading the compiler.
    __call__._torchdynamo_disable = True  # type: ignore[attr-defined]

    def __reduce__(self) -> Any:
        raise TypeError(
            "an executable has memory and streams of its process, and cannot be pickled or copied: send its program, "
            "which can, and compile it there"
        )


@frozen(eq=False)
class InGroup(Executable):
    """An executable of one process of a group, all of which call it; who fails tells the others (`PeerError`)."""

    peers: Peers
    collectives: tuple[Launch, ...]

    def __call__(self, *arguments: Any) -> Any:
        """Run one step; also raises `PeerError` where another rank was lost."""
        with self.peers.step(self.collectives):
            return super().__call__(*arguments)

    __call__._torchdynamo_disable = True  # type: ignore[attr-defined]
