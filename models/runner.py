"""A model on a backend: its parameters and caches, and programs compiled as they are needed.

One program serves every step of its sizes; the number of tokens is rounded up
to a power of two, so a few programs serve all.  A step in which a prompt is
filled in has a program, and an orchestration, of its own: there the current
part is a whole chunk and outweighs the exchange that it would hide, so it is
serial unless somebody asks for another one.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from attrs import define, evolve, field

from mla_fx import orchestrations
from mla_fx.decode import StepShape, plan_step
from mla_fx.dtypes import DTYPES
from mla_fx.effects import Equation, InputError, Orchestration, Program, Step, schedule
from mla_fx.effects.orchestration import orchestration
from mla_fx.effects.schedule import Mode
from mla_fx.layout import Layout
from mla_fx.models.checkpoint import Checkpoint
from mla_fx.models.config import ModelConfig
from mla_fx.models.load import Loader
from mla_fx.models.stack import model_step, mtp_step
from mla_fx.parameters import empty_cache
from mla_fx.passes import expanding_saves
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

    def compile(self, program: Program, prepared: Any) -> Callable[..., Any]:
        """A program as a function of its arguments, all but the parameters."""

    def put(self, tree: Any) -> Any:
        """A pytree of tensors as the backend takes it."""


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
    `expand`: a step that fills in prompts goes through `expand_current` where that saves multiply-adds.
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
    #: How sequences lie over ranks and blocks.
    sharding: Sharding = field(init=False)
    programs: dict[tuple[Any, ...], Callable[..., Any]] = field(factory=dict, init=False)
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

    def forward(self, pieces: Sequence[Piece], rows: Sequence[int], *, filling: bool) -> tuple[torch.Tensor, Any]:
        """One step: logits [len(rows), vocabulary] of the tokens numbered `rows`, and the hidden states of every rank.

        `filling` says that the step fills in a prompt.
        """
        tokens, shape, batches = self._batches(pieces, filling)
        wanted = _integers(rows, round_up(len(rows)))
        run = self._program(
            ("model", shape.tokens, len(wanted), shape.expand_current, filling),
            lambda: model_step(self.config, shape, rows=len(wanted), hidden=True),
            self.params,
            filling,
        )
        ids = _integers(tokens, shape.tokens)
        logits, hidden, self.caches = run(self.caches, self._all(ids), batches, self._all(wanted))
        return logits[0][: len(rows)], hidden

    def predict(
        self, pieces: Sequence[Piece], hidden: Any, sources: Sequence[int], rows: Sequence[int], *, filling: bool
    ) -> tuple[torch.Tensor, Any]:
        """A step of the prediction module: each piece has the tokens that follow its positions.

        `hidden` of every rank is what `forward` or an earlier `predict` gave, `sources` the row of it for each token.
        Returns logits [len(rows), vocabulary] and hidden states, as `forward`, and `filling` is as there.
        """
        if self.mtp is None:
            raise InputError("mtp: the runner must have the parameters of a prediction module: got None")
        tokens, shape, batches = self._batches(pieces, filling)
        wanted = _integers(rows, round_up(len(rows)))
        given = hidden[0].shape[0]
        run = self._program(
            ("mtp", shape.tokens, len(wanted), given, shape.expand_current, filling),
            lambda: mtp_step(self.config, shape, given=given, rows=len(wanted)),
            self.mtp,
            filling,
        )
        ids, taken = _integers(tokens, shape.tokens), _integers(sources, shape.tokens)
        logits, after, self.mtp_caches = run(
            self.mtp_caches, self._all(ids), hidden, self._all(taken), batches, self._all(wanted)
        )
        return logits[0][: len(rows)], after

    def _batches(self, pieces: Sequence[Piece], filling: bool) -> tuple[list[int], StepShape, list[Any]]:
        """All new tokens, the shape of a step that has room for them, and its batches."""
        tokens = [token for piece in pieces for token in piece.tokens]
        split = self._chosen(filling).split
        shape = evolve(self.shape, tokens=max(round_up(len(tokens)), 2 if split else 1), split=split)
        if filling and self._expands(pieces):
            shape = evolve(shape, project_before_merge=True, expand_current=True)
        batches = plan_step(
            self.sharding,
            shape,
            history=[piece.start for piece in pieces],
            query=[len(piece.tokens) for piece in pieces],
            block_table=[piece.table for piece in pieces],
        )
        return tokens, shape, [batches[self.shape.layout.index("dcp", rank)] for rank in self.backend.here]

    def _expands(self, pieces: Sequence[Piece]) -> bool:
        """Whether `expand_current` saves multiply-adds, and the parameters are in the form that it wants.

        They are, on a context group of one, in any form: its own heads are all heads of the group.
        """
        plain = not self.shape.project_before_merge
        if not self.expand or (plain and self.shape.layout.dcp > 1):
            return False
        return expanding_saves(self.config.attention, [len(piece.tokens) for piece in pieces], plain=plain) > 0

    def _chosen(self, filling: bool) -> Orchestration:
        return orchestration(self.prefill_orchestration if filling else self.orchestration)

    def _program(
        self, key: tuple[Any, ...], step: Callable[[], Step], params: Any, filling: bool
    ) -> Callable[..., Any]:
        if key not in self.programs:
            program = schedule(self.backend.lower(step()), self._chosen(filling), mode=self.mode)
            self.programs[key] = self.backend.compile(program, params)
        return self.programs[key]

    def _cache(self, layers: int) -> Any:
        shape = self.shape
        caches = empty_cache(
            self.config.attention,
            blocks=shape.blocks,
            block_size=shape.block_size,
            dtype=DTYPES[self.backend.dtype or shape.dtype],
            layers=layers,
        )
        return self.backend.put(caches)

    def _all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor for _ in self.backend.here]


def _integers(values: Sequence[int], size: int) -> torch.Tensor:
    """On the host, from where a step sends them."""
    return torch.tensor([*values, *[0] * (size - len(values))], dtype=torch.int64)


def _agree(backend: Interpreter, shape: StepShape) -> None:
    if backend.layout != shape.layout:
        raise InputError(f"ranks: must be those of the backend, {backend.layout}: got {shape.layout} in the shape")


def round_up(count: int) -> int:
    """The next power of two, for sizes that a program is compiled for.

    >>> [round_up(n) for n in (0, 1, 3, 64, 65)]
    [1, 1, 4, 64, 128]
    """
    return 1 << max(count - 1, 0).bit_length()
