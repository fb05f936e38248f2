"""A model on a backend: its parameters and caches, and programs compiled as they are needed.

One program serves every step of its sizes; the number of tokens is rounded up
to a power of two, so a few programs serve all.  A step in which a prompt is
filled in has a program, and an orchestration, of its own: there the current
part is a whole chunk and outweighs the exchange that it would hide, so it is
serial unless somebody asks for another one.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Protocol

import torch
from attrs import asdict, define, evolve, field

from mla_fx import orchestrations
from mla_fx.decode import StepShape, attention_step, plan_step
from mla_fx.dtypes import DTYPES
from mla_fx.effects import Equation, InputError, Orchestration, Program, Step, ops, schedule
from mla_fx.effects.orchestration import orchestration
from mla_fx.effects.schedule import Mode
from mla_fx.layout import Layout
from mla_fx.models.capture import Captures, Form, Widths, filled, form_of, forms, sizes
from mla_fx.models.checkpoint import Checkpoint
from mla_fx.models.chunks import chunk_of, expands, round_up
from mla_fx.models.config import ModelConfig
from mla_fx.models.load import Loader
from mla_fx.models.stack import model_step, mtp_step
from mla_fx.parameters import empty_cache
from mla_fx.sharding import Sharding


class Interpreter(Protocol):
    """What runs programs; `mla_fx.backends.get` gives one."""

    @property
    def layout(self) -> Layout:
        """How the ranks of a program are laid out."""

    @property
    def here(self) -> range:
        """The ranks that this process runs: what they are given, and give, is in lists with an entry for each."""

    @property
    def dtype(self) -> str | None:
        """The floating dtype that replaces a program's, or None."""

    def lower(self, step: Step) -> Step:
        """A step into one that makes use of what the backend has operators for."""

    def prepare(self, described: Step, *arguments: Any) -> Any:
        """The parameters of a step, checked and placed, for any number of programs with the same."""

    def compile(self, program: Program, prepared: Any, *, capture: bool = False) -> Callable[..., Any]:
        """A program as a function of its arguments, all but the parameters; `capture`: as a graph of the device."""

    def put(self, tree: Any) -> Any:
        """A pytree of tensors as the backend takes it."""

    def reading(self) -> AbstractContextManager[None]:
        """Where the host waits for results: what goes wrong with the processes of others is said in here."""

    def agree(self, stated: Mapping[str, object]) -> None:
        """Raises `InputError` where processes that run this together do not all state the same."""

    def share(self, value: Any) -> list[Any]:
        """What every rank says, told to all, by rank: small values on the host, that can be pickled."""


@define(kw_only=True)
class Piece:
    """What a step does for one request: `tokens` at positions `start`, `start` + 1, ...; `table` its blocks."""

    tokens: Sequence[int]
    start: int
    table: Sequence[int]


@define(kw_only=True, eq=False)
class Runner:
    """Runs a model's steps.  `params` and, for drafts, `mtp` have an entry for each rank here; they are prepared once.

    `shape` says ranks, dtype, blocks, block size, table width and the number of requests; its tokens do not matter.
    `interleave` is that of the sharding.  Steps are split into micro-batches as their orchestration wants it.
    `expand`: a step that fills in prompts goes through `expand_current` where that saves multiply-adds.  `capture`: the
    token counts whose decode steps are captured on a device that has graphs (`mla_fx.models.capture`), before the first
    step, or by `ready`; what such a step gives holds until the next one.  `contexts`: token counts up to which captured
    steps have block tables of their own, for devices where such a step costs what its table has room for (CUDA).
    """

    config: ModelConfig
    backend: Interpreter
    shape: StepShape
    params: Any  # of `ModelParams`, until they are prepared
    mtp: Any = None  # of `MtpParams`
    interleave: int = 1
    orchestration: Orchestration | Callable[[Equation], str] = orchestrations.attention_aside
    prefill_orchestration: Orchestration | Callable[[Equation], str] = orchestrations.serial
    mode: Mode = "minimal"
    expand: bool = True
    capture: Sequence[int] = field(default=(), converter=sizes)
    contexts: Sequence[int] = field(default=(), converter=sizes)
    #: How sequences lie over ranks and blocks.
    sharding: Sharding = field(init=False)
    programs: dict[tuple[Any, ...], Callable[..., Any]] = field(factory=dict, init=False)
    captures: Captures = field(factory=Captures, init=False)
    caches: list[Any] = field(init=False)
    mtp_caches: list[Any] = field(init=False)

    def __attrs_post_init__(self) -> None:
        _agree(self.backend, self.shape)
        self.sharding = Sharding(
            ranks=self.shape.layout.dcp, interleave=self.interleave, block_size=self.shape.block_size
        )
        self.params = self.backend.prepare(model_step(self.config, self.shape), self.params)
        if self.mtp is not None:
            self.mtp = self.backend.prepare(mtp_step(self.config, self.shape, given=1, rows=1), self.mtp)
        self.caches = [self._cache(self.config.num_hidden_layers) for _ in self.backend.here]
        self.mtp_caches = [self._cache(1)[0] for _ in self.backend.here if self.mtp is not None]

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, backend: Interpreter, *, shape: StepShape, mtp: bool = False, **options: Any
    ) -> "Runner":
        """Read the parts of a checkpoint that the ranks here need, in the dtype and quantisation of `shape`.

        `mtp`: with the prediction module.  Further options are fields of the runner, and `progress` for a bar.
        """
        _agree(backend, shape)  # before anything is read
        progress = options.pop("progress", False)
        backend.agree(_stated(checkpoint, shape, options | {"mtp": mtp}))
        params, modules = [], []
        for rank in backend.here:
            loader = Loader(
                checkpoint=checkpoint,
                rank=rank,
                ranks=shape.layout,
                dtype=DTYPES[shape.dtype],
                **shape.form,
                quantization=shape.quantization,
                progress=progress,
            )
            params.append(loader.model())
            if mtp:
                modules.append(loader.mtp(params[-1]))
        return cls(
            config=checkpoint.config, backend=backend, shape=shape, params=params, mtp=modules or None, **options
        )

    @property
    def replicas(self) -> int:
        """How many data-parallel replicas a step is of: each has caches of its own, and pieces of its own."""
        return self.shape.layout.dp

    def forward(
        self, pieces: Sequence[Sequence[Piece]], rows: Sequence[Sequence[int]], *, filling: bool
    ) -> tuple[list[torch.Tensor | None], Any]:
        """One step, of the `pieces` and `rows` of each replica.

        Returns for each replica the logits [len(rows), vocabulary] of its tokens numbered `rows`, as its first rank has
        them (None where that rank runs in another process), and the hidden states of every rank here.  `filling` says
        that the step fills in a prompt.
        """
        if not self.captures.checked:
            self.ready()
        self.captures.check()
        return self._forward(pieces, rows, filling, self._form("model", pieces, filling))

    def ready(self, *, drafts: bool | None = None, chunk: int | None = None) -> None:
        """Capture all forms there are, so that nothing is captured once requests are served; an engine does it.

        `drafts` says whether steps verify some: unless told, where there is a prediction module.  First a step runs
        that fills in `chunk` tokens of nobody, so that workspaces are as large as any step wants them.  What is there
        already stays; without `capture` there is nothing to do.  A collective: every process of the group calls it.
        """
        if not self.capture:
            return
        drafts = self.mtp is not None if drafts is None else drafts
        kinds = ("model", "mtp") if drafts and self.mtp is not None else ("model",)
        if not self.captures.members:
            self._pad(kinds, None, round_up(chunk or self.chunk))
        split = self._chosen(False).split is not None
        for form in forms(self.capture, split=split, drafts=drafts, widths=self._widths):
            if not self.captures.members.keys() >= {(kind, form) for kind in kinds}:
                self._pad(kinds, form, form.tokens)
        self.captures.check()

    def _pad(self, kinds: Sequence[str], form: Form | None, tokens: int) -> None:
        """A step of so many tokens of padding, of the model, and of the prediction module."""
        nothing: list[Sequence[Any]] = [()] * self.replicas
        _, hidden = self._forward(nothing, nothing, form is None, form, tokens)
        if "mtp" in kinds:
            self._predict(nothing, hidden, nothing, nothing, form is None, form, tokens)

    def _form(self, kind: str, pieces: Sequence[Sequence[Piece]], filling: bool) -> Form | None:
        """The form that a step is captured in, None where it is in none."""
        if filling or not self.capture:
            return None
        lengths = [[len(piece.tokens) for piece in mine] for mine in pieces]
        longest = max((piece.start + len(piece.tokens) for mine in pieces for piece in mine), default=0)
        form = form_of(
            self.capture,
            lengths,
            split=self._chosen(filling).split is not None,
            widths=self._widths,
            columns=self.sharding.blocks(longest),
        )
        return form if (kind, form) in self.captures.members else None

    @property
    def _widths(self) -> Widths:
        """Columns of the tables of captured steps."""
        columns = dict.fromkeys(map(self.sharding.blocks, self.contexts))
        return (None, *(count for count in columns if count < self.shape.table_width))

    def _forward(
        self,
        pieces: Sequence[Sequence[Piece]],
        rows: Sequence[Sequence[int]],
        filling: bool,
        form: Form | None,
        size: int | None = None,
    ) -> tuple[list[torch.Tensor | None], Any]:
        """A step of the model, captured as `form` where that is not None; `size`: of so many tokens, padding too."""
        tokens, shape, batches = self._batches(pieces, filling, form, size, least=0)
        wanted = _integers(rows, size=form.tokens if form else None)
        width = wanted[0].shape[0]
        key = ("model", form) if form else ("model", shape.tokens, width, shape.expand_current, filling)
        run = self._program(
            key, lambda: model_step(self.config, shape, rows=width, hidden=True), self.params, filling, form
        )
        logits, hidden, self.caches = run(self.caches, self._here(tokens), batches, self._here(wanted))
        self._ran(key, run, form, hidden)
        return self._first(logits, rows), hidden

    def _ran(self, key: tuple[Any, ...], run: Any, form: Form | None, hidden: Any) -> None:
        """What is captured, and what runs beside it, is held against the law of a session once it has run."""
        if not self.capture:
            return
        serving = bool(self.captures.checked)
        self.captures.add(key, run, captured=form is not None)
        if form is not None:
            self.captures.give(key, hidden)
        elif serving:
            self.captures.check()

    def predict(
        self,
        pieces: Sequence[Sequence[Piece]],
        hidden: Any,
        sources: Sequence[Sequence[int]],
        rows: Sequence[Sequence[int]],
        *,
        filling: bool,
    ) -> tuple[list[torch.Tensor | None], Any]:
        """A step of the prediction module: each piece has the tokens that follow its positions.

        `hidden` of every rank is what `forward` or an earlier `predict` gave, `sources` the row of it for each token of
        a replica.  Returns logits and hidden states as `forward` does, and `filling` is as there.
        """
        if self.mtp is None:
            raise InputError("mtp: the runner must have the parameters of a prediction module: got None")
        self.captures.check()
        self.captures.hold(hidden)
        fits = bool(self.capture) and hidden[0].shape[0] <= self.capture[0]
        form = self._form("mtp", pieces, filling) if fits else None
        return self._predict(pieces, hidden, sources, rows, filling, form)

    def _predict(
        self,
        pieces: Sequence[Sequence[Piece]],
        hidden: Any,
        sources: Sequence[Sequence[int]],
        rows: Sequence[Sequence[int]],
        filling: bool,
        form: Form | None,
        size: int | None = None,
    ) -> tuple[list[torch.Tensor | None], Any]:
        """A step of the prediction module, as `_forward`.  One that is captured takes as many rows as any may have."""
        tokens, shape, batches = self._batches(pieces, filling, form, size, least=-1)
        wanted = _integers(rows, size=form.tokens if form else None)
        taken, width = _integers(sources, shape.tokens), wanted[0].shape[0]
        hidden = [_with_rows(one, self.capture[0]) for one in hidden] if form else hidden
        given = hidden[0].shape[0]
        key = ("mtp", form) if form else ("mtp", shape.tokens, width, given, shape.expand_current, filling)
        run = self._program(key, lambda: mtp_step(self.config, shape, given=given, rows=width), self.mtp, filling, form)
        logits, after, self.mtp_caches = run(
            self.mtp_caches, self._here(tokens), hidden, self._here(taken), batches, self._here(wanted)
        )
        self._ran(key, run, form, after)
        return self._first(logits, rows), after

    def decided(self, said: Sequence[Any]) -> list[Any]:
        """What each replica's first rank says, told to all: `said` has an entry for each replica that counts there.

        Small values on the host, that can be pickled.  A collective: every process of the group must call it.
        """
        told = self.backend.share(list(said))
        return [told[first][number] for number, first in enumerate(self._firsts)]

    def reading(self) -> AbstractContextManager[None]:
        """Where logits are read on the host, which waits for what its device computes: see `Interpreter.reading`."""
        return self.backend.reading()

    @property
    def _firsts(self) -> range:
        """The first rank of each replica."""
        return range(0, self.shape.layout.size, self.shape.layout.tp)

    def _batches(
        self, pieces: Sequence[Sequence[Piece]], filling: bool, form: Form | None, size: int | None, *, least: int
    ) -> tuple[list[torch.Tensor], StepShape, list[Any]]:
        """The new tokens of each replica, the shape of a step that has room for all, and the batches of the ranks here.

        With a form or a size it has so many, those of padding being requests' too: see `mla_fx.batch.whole`.  Every
        process makes those of all replicas, so that what is refused is refused in all, before anything has run.
        """
        every = [piece for of_replica in pieces for piece in of_replica]
        split = self._chosen(filling).split
        size = form.tokens if form else size
        tokens = _integers(
            [[token for piece in mine for token in piece.tokens] for mine in pieces], 2 if split else 1, size=size
        )
        self._known(tokens, least)
        shape = evolve(self.shape, tokens=tokens[0].shape[0], split=split)
        shape = form.shape(shape) if form else shape
        if filling and self._expands(every or [Piece(tokens=[0] * shape.tokens, start=0, table=())]):
            shape = evolve(shape, project_before_merge=True, expand_current=True)
        batches = [
            plan_step(
                self.sharding,
                shape,
                history=[piece.start for piece in mine],
                query=[len(piece.tokens) for piece in mine],
                block_table=[piece.table[: shape.table_width] for piece in mine],
            )
            for mine in pieces
        ]
        if size is not None:
            batches = [[filled(of_rank) for of_rank in of_replica] for of_replica in batches]
        layout = shape.layout
        own = [batches[layout.replica(rank)][layout.index("dcp", rank)] for rank in self.backend.here]
        return tokens, shape, own

    def _known(self, tokens: Sequence[torch.Tensor], least: int) -> None:
        """Tokens that have an embedding; `least` is -1 where none is one, too."""
        most = self.config.vocab_size - 1
        for number, mine in enumerate(tokens):
            if int(mine.min()) < least or int(mine.max()) > most:
                where = f" of replica {number}" if self.replicas > 1 else ""
                raise InputError(f"tokens{where}: each must be in {least}..{most}: got {mine.tolist()}")

    @property
    def chunk(self) -> int:
        """How many tokens a step that fills in prompts has at most, unless somebody knows better: see `chunk_of`."""
        return chunk_of(self.config.attention, self.shape, expand=self.expand)

    def _expands(self, pieces: Sequence[Piece]) -> bool:
        """Whether a step goes through `expand_current`, by what it does for each request."""
        if not self.expand:
            return False
        lengths = [len(piece.tokens) for piece in pieces]
        behind = [piece.start for piece in pieces] if self._history_too else None
        return expands(self.config.attention, self.shape, lengths, behind)

    @cached_property
    def _history_too(self) -> bool:
        """Whether the backend chooses a form for the history of each request of an expanded step, with all heads."""
        if self.shape.layout.dcp > 1:
            return False
        shape = evolve(self.shape, tokens=1, project_before_merge=True, expand_current=True, split=None)
        step = self.backend.lower(attention_step(self.config.attention, shape))
        return not any(isinstance(equation.op, ops.HistoryAttention) for equation in step.equations)

    def _chosen(self, filling: bool) -> Orchestration:
        return orchestration(self.prefill_orchestration if filling else self.orchestration)

    def _program(
        self, key: tuple[Any, ...], step: Callable[[], Step], params: Any, filling: bool, form: Form | None
    ) -> Callable[..., Any]:
        if key not in self.programs:
            program = schedule(self.backend.lower(step()), self._chosen(filling), mode=self.mode)
            if form is None:
                self.programs[key] = self.backend.compile(program, params)
            else:
                self.programs[key] = self.backend.compile(form.program(program), params, capture=True)
        return self.programs[key]

    def _cache(self, layers: int) -> Any:
        shape = self.shape
        # So a step runs in inference mode, which spares a small step's operators a fifth of their time: see `door`.
        with torch.inference_mode():
            caches = empty_cache(
                self.config.attention,
                blocks=shape.blocks,
                block_size=shape.block_size,
                dtype=DTYPES[self.backend.dtype or shape.dtype],
                layers=layers,
            )
            return self.backend.put(caches)

    def _here(self, of_replicas: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What each rank here takes of what there is for each replica."""
        return [of_replicas[self.shape.layout.replica(rank)] for rank in self.backend.here]

    def _first(self, logits: Sequence[torch.Tensor], rows: Sequence[Sequence[int]]) -> list[torch.Tensor | None]:
        """Of each replica, from the logits of every rank here."""
        own = dict(zip(self.backend.here, logits, strict=True))
        return [own[rank][: len(mine)] if rank in own else None for rank, mine in zip(self._firsts, rows, strict=True)]


def _integers(of_replicas: Sequence[Sequence[int]], least: int = 1, *, size: int | None = None) -> list[torch.Tensor]:
    """On the host, from where a step sends them; padded to `size`, or the power of two with room for the longest."""
    size = size or max(least, *(round_up(len(values)) for values in of_replicas))
    return [torch.tensor([*values, *[0] * (size - len(values))], dtype=torch.int64) for values in of_replicas]


def _with_rows(hidden: torch.Tensor, count: int) -> torch.Tensor:
    """Hidden states with so many rows, those behind being nobody's."""
    short = count - hidden.shape[0]
    return torch.cat([hidden, hidden[:1].expand(short, -1)]) if short else hidden


def _stated(checkpoint: Checkpoint, shape: StepShape, options: Mapping[str, Any]) -> dict[str, object]:
    """What a model is run with, by field: the same in all processes that run it together."""
    sizes = {f"shape.{name}": value for name, value in asdict(shape, recurse=False).items()}
    chosen = {
        name: orchestration(value).name if name.endswith("orchestration") else value for name, value in options.items()
    }
    return {"config": checkpoint.config, "checkpoint": checkpoint.digest, **sizes, **chosen}


def _agree(backend: Interpreter, shape: StepShape) -> None:
    if backend.layout != shape.layout:
        raise InputError(f"ranks: must be those of the backend, {backend.layout}: got {shape.layout} in the shape")
