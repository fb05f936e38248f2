"""Continuous batching: requests come and go, and every step serves all that run.

A step gives each running request its next tokens to process: one that decodes
its last token and the drafts behind it, one whose prompt is not filled in yet
a chunk of it, as far as the step's budget reaches.  Decoding goes first, then
prompts in the order of arrival, so a long prompt delays nobody by more than a
step.  When blocks run out, the request that came last gives its blocks back and
starts over later from the tokens it has; nothing it said is lost.

Drafts are verified, not trusted: token g[i] is what the model itself says
behind draft i, and drafts are accepted up to the first that is not g.  What is
generated is therefore what plain greedy decoding generates, whatever the
drafts are.  Source: speculative decoding (arXiv 2211.17192), greedy case.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from attrs import define, field, frozen

from mla_fx.effects import InputError
from mla_fx.models.blocks import BlockManager, OutOfBlocksError
from mla_fx.models.runner import Piece, Runner


@define(eq=False)
class Request:
    """A prompt and what has been generated behind it; `cached` of its tokens are in the caches."""

    number: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    generator: torch.Generator
    tokens: list[int] = field(init=False)
    cached: int = 0
    drafts: list[int] = field(factory=list)
    drafted: int = 0
    accepted: int = 0
    arrived: float = field(factory=time.perf_counter)
    first_token: float | None = None

    def __attrs_post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def new_tokens(self) -> list[int]:
        """What has been generated."""
        return self.tokens[len(self.prompt) :]

    @property
    def left(self) -> int:
        """How many tokens may still be generated."""
        return self.max_new_tokens - len(self.new_tokens)


@frozen
class Served:
    """What a step settled for a request: `count` positions from `start` on, rows `row` and on of the step.

    `table` are the blocks it holds, `room` how many positions these are.
    """

    request: Request
    start: int
    count: int
    row: int
    table: tuple[int, ...]
    room: int


class Drafter(Protocol):
    """Proposes tokens for the next step, which verifies them."""

    @property
    def count(self) -> int:
        """The most drafts a request gets."""

    def propose(self, served: Sequence[Served], hidden: Any) -> list[list[int]]:
        """Drafts behind the last token of each request, any number up to `count`.

        `hidden` are the step's hidden states of every rank; row `served.row` + i stands at position `start` + i.
        """


@frozen
class Output:
    """Tokens that a step generated for a request, and whether it is finished."""

    request: Request
    tokens: tuple[int, ...]
    finished: bool


def _tokens(end: Iterable[int]) -> frozenset[int]:
    return frozenset(end)


@define(kw_only=True, eq=False)
class Engine:
    """Serves requests on a runner, at most `runner.shape.requests` at a time and `chunk` tokens a step.

    Sampling is greedy at temperature 0.  A text ends with a token of `end`, or at its request's limit.
    """

    runner: Runner
    chunk: int = 64
    temperature: float = 0.0
    drafter: Drafter | None = None
    end: frozenset[int] = field(default=(), converter=_tokens)
    blocks: BlockManager = field(init=False)
    waiting: deque[Request] = field(factory=deque, init=False)
    running: list[Request] = field(factory=list, init=False)
    _count: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        shape = self.runner.shape
        if self.chunk < shape.requests:
            raise InputError(f"chunk: must be at least the requests of a step, {shape.requests}: got {self.chunk}")
        if not self.temperature >= 0:
            raise InputError(f"temperature: must be a number of at least 0: got {self.temperature}")
        if self.temperature and self.drafter is not None:
            raise InputError(f"temperature: must be 0 with drafts, which are verified greedily: got {self.temperature}")
        self.blocks = BlockManager(self.runner.sharding, shape.blocks)

    @property
    def busy(self) -> bool:
        """Whether a request is running or waiting."""
        return bool(self.running or self.waiting)

    def add(self, prompt: Sequence[int], *, max_new_tokens: int, seed: int = 0) -> Request:
        """Queue a prompt; raises `InputError` for one that can never be served."""
        vocabulary = self.runner.config.vocab_size
        if not prompt:
            raise InputError("prompt: must have at least one token: got none")
        for token in prompt:
            if not 0 <= token < vocabulary:
                raise InputError(f"prompt: each token must be in 0..{vocabulary - 1}: got {token}")
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise InputError(f"max_new_tokens: must be an integer of at least 1: got {max_new_tokens!r}")
        total, shape = len(prompt) + max_new_tokens, self.runner.shape
        need, most = self.runner.sharding.blocks(total), min(shape.blocks, shape.table_width)
        if need > most:
            raise OutOfBlocksError(
                f"blocks: prompt and max_new_tokens, {total} positions, need {need} blocks of "
                f"{shape.ranks * shape.block_size}, and a request can have {most}"
            )
        limit = self.runner.config.max_position_embeddings
        if limit is not None and total > limit:
            raise InputError(
                f"max_new_tokens: with the prompt must be at most max_position_embeddings, {limit}: got {total}"
            )
        generator = torch.Generator().manual_seed(seed)
        request = Request(self._count, tuple(prompt), max_new_tokens, generator)
        self._count += 1
        self.waiting.append(request)
        return request

    def abort(self, request: Request) -> None:
        """Give up a request and its blocks; what it generated stays with it."""
        if request in self.running:
            self.running.remove(request)
            self.blocks.free(request.number)
        elif request in self.waiting:
            self.waiting.remove(request)
        else:
            raise InputError(f"request: must be running or waiting: got number {request.number}")

    def run(self) -> Iterator[Output]:
        """Step until all requests are finished."""
        while self.busy:
            yield from self.step()

    def step(self) -> list[Output]:
        """One step of the model for all that run; what it generated."""
        pieces = self._plan()
        if not pieces:
            return []
        filling = any(len(p.tokens) > 1 + len(r.drafts) for r, p in pieces)
        wanted: list[int] = []
        first_rows: list[int] = []
        row = 0
        for request, piece in pieces:
            first_rows.append(row)
            row += len(piece.tokens)
            whole = piece.start + len(piece.tokens) >= len(request.tokens)
            wanted += range(row - 1 - len(request.drafts), row) if whole else ()
        logits, hidden = self.runner.forward([piece for _, piece in pieces], wanted, filling=filling)
        outputs, settled = self._accept(pieces, first_rows, logits)
        if self.drafter and settled:
            served = [self._served(*one) for one in settled]
            for one, drafts in zip(served, self.drafter.propose(served, hidden), strict=True):
                one.request.drafts = self._allowed(one.request, drafts)
        return outputs

    # --- which tokens a step processes --------------------------------------

    def _plan(self) -> list[tuple[Request, Piece]]:
        """Pieces of this step; admits waiting requests, and takes blocks back where there are not enough."""
        while self.waiting and len(self.running) < self.runner.shape.requests:
            request = self.waiting[0]
            try:
                self.blocks.allocate(request.number, len(request.tokens))
            except OutOfBlocksError:
                break
            self.running.append(self.waiting.popleft())
        budget, pieces = self.chunk, dict[int, tuple[Request, Piece]]()
        for request in sorted(self.running, key=lambda r: (len(r.tokens) - r.cached > 1, r.number)):
            if request not in self.running:
                continue  # it has just given its blocks back
            pending = [*request.tokens[request.cached :], *request.drafts]
            tokens = pending[:budget]
            if len(tokens) <= len(pending) - len(request.drafts):
                request.drafts = []
            elif len(tokens) < len(pending):
                request.drafts = request.drafts[: len(tokens) - len(pending)]
            if tokens and self._hold(request, request.cached + len(tokens), pieces):
                table = self.blocks.table(request.number)
                pieces[request.number] = request, Piece(tokens=tokens, start=request.cached, table=table)
                budget -= len(tokens)
        return list(pieces.values())

    def _hold(self, request: Request, length: int, pieces: dict[int, tuple[Request, Piece]]) -> bool:
        """Make sure that a request holds blocks for `length` positions, if need be by preempting later ones."""
        while True:
            try:
                self.blocks.append(request.number, length)
                return True
            except OutOfBlocksError:
                last = max(self.running, key=lambda r: r.number)
                pieces.pop(last.number, None)
                self.running.remove(last)
                self.blocks.free(last.number)
                last.cached, last.drafts = 0, []
                self.waiting.appendleft(last)
                if last is request:
                    return False

    # --- what it gave --------------------------------------------------------

    def _accept(
        self, pieces: list[tuple[Request, Piece]], first_rows: list[int], logits: torch.Tensor
    ) -> tuple[list[Output], list[tuple[Request, int, int, int]]]:
        """Take over what the model says; requests that are finished give their blocks back.

        Also what is settled of those that go on: request, first position, how many, first row.
        """
        chosen = logits.argmax(1).tolist() if not self.temperature else None
        outputs: list[Output] = []
        settled: list[tuple[Request, int, int, int]] = []
        at = 0
        for (request, piece), row in zip(pieces, first_rows, strict=True):
            whole = piece.start + len(piece.tokens) >= len(request.tokens)
            if not whole:
                request.cached += len(piece.tokens)
                settled.append((request, piece.start, len(piece.tokens), row))
                continue
            count = 1 + len(request.drafts)
            said = chosen[at : at + count] if chosen is not None else [self._sample(request, logits[at])]
            at += count
            new = verify(request.drafts, said)
            request.drafted += len(request.drafts)
            request.accepted += len(new) - 1
            cached = len(piece.tokens) - len(request.drafts) + len(new) - 1
            request.drafts = []
            request.cached += cached
            outputs.append(self._take(request, new))
            if not outputs[-1].finished:
                settled.append((request, piece.start, cached, row))
        return outputs, settled

    def _take(self, request: Request, new: list[int]) -> Output:
        """Add tokens to a request, up to an end token or its limit."""
        new = new[: request.left]
        ends = [i for i, token in enumerate(new) if token in self.end]
        if ends:
            new = new[: ends[0] + 1]
        request.tokens += new
        request.first_token = request.first_token or time.perf_counter()
        finished = bool(ends) or request.left == 0
        if finished:
            self.running.remove(request)
            self.blocks.free(request.number)
        return Output(request, tuple(new), finished)

    def _served(self, request: Request, start: int, count: int, row: int) -> Served:
        """With blocks for the positions of drafts, where there are any free."""
        ahead = min(self.drafter.count if self.drafter else 0, request.left)
        with contextlib.suppress(OutOfBlocksError):
            self.blocks.append(request.number, request.cached + ahead)
        table, sharding = self.blocks.table(request.number), self.runner.sharding
        return Served(request, start, count, row, table, len(table) * sharding.block_size * sharding.ranks)

    def _allowed(self, request: Request, drafts: list[int]) -> list[int]:
        """Drafts that may still count: one token comes without any, and a draft must be a token."""
        count = self.drafter.count if self.drafter else 0
        vocabulary = self.runner.config.vocab_size
        for draft in drafts:
            if not 0 <= draft < vocabulary:
                raise InputError(f"drafts: each must be in 0..{vocabulary - 1}: got {draft}")
        behind_prompt = request.cached + 1 == len(request.tokens) and request.new_tokens
        return drafts[: max(min(count, request.left - 1), 0)] if behind_prompt else []

    def _sample(self, request: Request, logits: torch.Tensor) -> int:
        weights = torch.softmax(logits.cpu().double() / self.temperature, 0)
        return int(torch.multinomial(weights, 1, generator=request.generator))


def verify(drafts: Sequence[int], said: Sequence[int]) -> list[int]:
    """The tokens that greedy decoding gives: accepted drafts, then what the model says behind the last of them.

    `said[i]` is the model's token behind draft i - 1, `said[0]` that behind the last known token.

    >>> verify([7, 8, 9], [7, 8, 1, 2])
    [7, 8, 1]
    """
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == said[accepted]:
        accepted += 1
    return list(said[: accepted + 1])
