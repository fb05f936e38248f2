"""Continuous batching: requests come and go, and every step serves all that run.

A step gives each running request its next tokens to process: one that decodes
its last token and the drafts behind it, one whose prompt is not filled in yet
a chunk of it, as far as the step's budget reaches.  Decoding goes first, then
prompts in the order of arrival, so a long prompt delays no text by more than a
step; drafts leave room for them, so they delay no prompt for ever.  When blocks
run out, the request that came last gives its blocks back and starts over later
from the tokens it has; nothing it said is lost, and the oldest always goes on.

Drafts are verified, not trusted: token g[i] is what the model itself says
behind draft i, and drafts are accepted up to the first that is not g.  What is
generated is therefore what plain greedy decoding generates, whatever the
drafts are.  Source: speculative decoding (arXiv 2211.17192), greedy case.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from operator import index
from typing import Any, Protocol

import torch
from attrs import define, field, frozen

from mla_fx.effects import InputError
from mla_fx.models.blocks import BlockManager, OutOfBlocksError
from mla_fx.models.runner import Piece, Runner


@define(eq=False)
class Request:
    """A prompt and what has been generated behind it; `cached` of its tokens are in the caches.

    `drafts` go into its next step; `drafted` counts those that were verified, `accepted` those that became its tokens.
    `arrived` and `first_token` are times of `time.perf_counter`.
    """

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
        return len(self.prompt) + self.max_new_tokens - len(self.tokens)

    @property
    def pending(self) -> int:
        """How many of its tokens are not in the caches; always at least one, for the last one says the next."""
        return len(self.tokens) - self.cached


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


def _prompt(given: Iterable[int], vocabulary: int) -> tuple[int, ...]:
    try:
        tokens = tuple(index(token) for token in given)
    except TypeError:
        raise InputError(f"prompt: each token must be an integer: got {given!r}") from None
    if not tokens:
        raise InputError("prompt: must have at least one token: got none")
    for token in tokens:
        if not 0 <= token < vocabulary:
            raise InputError(f"prompt: each token must be in 0..{vocabulary - 1}: got {token}")
    return tokens


def _tokens(end: Iterable[int]) -> frozenset[int]:
    return frozenset(end)


@define(kw_only=True, eq=False)
class Engine:
    """Serves requests on a runner, at most `runner.shape.requests` at a time and `chunk` tokens a step.

    Sampling is greedy at temperature 0.  A text ends with a token of `end`, or at its request's limit.
    Whatever runs came before whatever waits, and both are in the order of their numbers.
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
        if not isinstance(self.chunk, int) or self.chunk < shape.requests:
            raise InputError(
                f"chunk: must be an integer of at least the requests of a step, {shape.requests}: got {self.chunk!r}"
            )
        if not self.temperature >= 0:
            raise InputError(f"temperature: must be a number of at least 0: got {self.temperature}")
        if self.temperature and self.drafter is not None:
            raise InputError(f"temperature: must be 0 with drafts, which are verified greedily: got {self.temperature}")
        self.blocks = BlockManager(self.runner.sharding, shape.blocks)

    def __reduce__(self) -> Any:
        raise TypeError("an engine has caches and executables of its process and cannot be pickled or copied: make one")

    @property
    def busy(self) -> bool:
        """Whether a request is running or waiting."""
        return bool(self.running or self.waiting)

    def add(self, prompt: Sequence[int], *, max_new_tokens: int, seed: int = 0) -> Request:
        """Queue a prompt; raises `InputError` for one that can never be served.

        `seed` decides what is sampled where the temperature is not 0, whatever else is served beside it.
        """
        tokens = _prompt(prompt, self.runner.config.vocab_size)
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise InputError(f"max_new_tokens: must be an integer of at least 1: got {max_new_tokens!r}")
        total, shape = len(tokens) + max_new_tokens, self.runner.shape
        need, most = self.runner.sharding.blocks(total - 1), min(shape.blocks, shape.table_width)
        if need > most:
            raise OutOfBlocksError(
                f"blocks: prompt and max_new_tokens, {total - 1} positions without the last, need {need} blocks of "
                f"{shape.ranks * shape.block_size}, and a request can have {most}"
            )
        limit = self.runner.config.max_position_embeddings
        if limit is not None and total > limit:
            raise InputError(
                f"max_new_tokens: with the prompt must be at most max_position_embeddings, {limit}: got {total}"
            )
        generator = torch.Generator().manual_seed(seed)
        request = Request(self._count, tokens, max_new_tokens, generator)
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
        parts = self._plan()
        if not parts:
            return []
        wanted = [row for part in parts for row in part.wanted]
        filling = any(len(part.piece.tokens) > 1 + len(part.request.drafts) for part in parts)
        logits, hidden = self.runner.forward([part.piece for part in parts], wanted, filling=filling)
        outputs, settled = self._accept(parts, logits)
        if self.drafter is not None and settled:
            served = [self._served(part, count) for part, count in settled]
            proposed = self.drafter.propose(served, hidden)
            if len(proposed) != len(served):
                raise InputError(f"drafts: must have a list for each of {len(served)} requests: got {len(proposed)}")
            for one, drafts in zip(served, proposed, strict=True):
                one.request.drafts = self._allowed(one.request, drafts)
        return outputs

    # --- which tokens a step processes --------------------------------------

    def _plan(self) -> list["_Part"]:
        """Parts of this step; takes blocks back where there are not enough, and admits waiting requests.

        Every request that decodes gets its last token, and the first prompt at least one; then drafts and the rest of
        prompts share what the step has left.
        """
        for request in list(self.running):
            if request.pending == 1:
                self._grow(request)
        self._admit()
        decoding = [request for request in self.running if request.pending == 1]
        prompts = [request for request in self.running if request.pending > 1]
        spare = self.chunk - len(decoding) - bool(prompts)
        parts: list[_Part] = []
        row = 0
        for request in decoding:
            request.drafts = self._fitting(request, request.drafts[:spare])
            spare -= len(request.drafts)
            parts.append(self._part(request, 1, row))
            row += 1 + len(request.drafts)
        for request in prompts:
            count = min(request.pending, self.chunk - row)
            if count:
                parts.append(self._part(request, count, row))
                row += count
        return parts

    def _admit(self) -> None:
        """Let requests run, in the order of their numbers, while there are blocks for the tokens they have."""
        while self.waiting and len(self.running) < self.runner.shape.requests:
            request = self.waiting[0]
            try:
                self.blocks.allocate(request.number, len(request.tokens))
            except OutOfBlocksError:
                return
            self.running.append(self.waiting.popleft())

    def _grow(self, request: Request) -> None:
        """Blocks for a request's last token, if need be those of the youngest, which may be the request itself."""
        while request in self.running:
            try:
                self.blocks.append(request.number, len(request.tokens))
                return
            except OutOfBlocksError:
                last = self.running.pop()
                self.blocks.free(last.number)
                last.cached, last.drafts = 0, []
                self.waiting.appendleft(last)

    def _fitting(self, request: Request, drafts: list[int]) -> list[int]:
        """The drafts there are blocks for; they are worth nobody's preemption."""
        known = len(request.tokens)
        return drafts[: self._room(request, known + len(drafts)) - known] if drafts else []

    def _room(self, request: Request, length: int) -> int:
        """How many positions a request's blocks are, once they are `length` if enough are free."""
        with contextlib.suppress(OutOfBlocksError):
            self.blocks.append(request.number, length)
        sharding = self.runner.sharding
        return len(self.blocks.table(request.number)) * sharding.block_size * sharding.ranks

    def _part(self, request: Request, count: int, row: int) -> "_Part":
        """The next `count` tokens of a request and all its drafts."""
        tokens = [*request.tokens[request.cached : request.cached + count], *request.drafts]
        piece = Piece(tokens=tokens, start=request.cached, table=self.blocks.table(request.number))
        return _Part(request, piece, row, last=count == request.pending)

    # --- what it gave --------------------------------------------------------

    def _accept(self, parts: list["_Part"], logits: torch.Tensor) -> tuple[list[Output], list[tuple["_Part", int]]]:
        """Take over what the model says; requests that are finished give their blocks back.

        Also the parts of those that go on, each with how many positions are settled.
        """
        chosen = logits.argmax(1).tolist() if not self.temperature else None
        outputs: list[Output] = []
        settled: list[tuple[_Part, int]] = []
        at = 0
        for part in parts:
            request, count, drafts = part.request, len(part.piece.tokens), part.request.drafts
            finished = False
            if part.last:
                said = [self._sample(request, logits[at])] if chosen is None else chosen[at : at + 1 + len(drafts)]
                at += len(said)
                new = verify(drafts, said)
                count -= 1 + len(drafts) - len(new)
                output = self._take(request, new)
                request.drafted += len(drafts)
                request.accepted += len(new) - 1
                request.drafts = []
                outputs.append(output)
                finished = output.finished
            request.cached += count
            if not finished:
                settled.append((part, count))
        return outputs, settled

    def _take(self, request: Request, new: list[int]) -> Output:
        """Add tokens to a request, up to an end token; it has room for all, having fewer drafts than tokens left."""
        new = _until(self.end, new)
        request.tokens += new
        if request.first_token is None:
            request.first_token = time.perf_counter()
        finished = request.left == 0 or new[-1] in self.end
        if finished:
            self.running.remove(request)
            self.blocks.free(request.number)
        return Output(request, tuple(new), finished)

    def _served(self, part: "_Part", count: int) -> Served:
        """With blocks for the positions of drafts, where there are any free."""
        request, ahead = part.request, self.drafter.count if self.drafter is not None else 0
        room = self._room(request, request.cached + min(ahead, request.left))
        return Served(request, part.piece.start, count, part.row, self.blocks.table(request.number), room)

    def _allowed(self, request: Request, drafts: Sequence[int]) -> list[int]:
        """Drafts that may still count: one token comes without any, and nothing comes behind an end token."""
        vocabulary = self.runner.config.vocab_size
        for draft in drafts:
            if not isinstance(draft, int) or not 0 <= draft < vocabulary:
                raise InputError(f"drafts: each must be in 0..{vocabulary - 1}: got {draft!r}")
        if request.pending > 1 or not request.new_tokens or self.drafter is None:
            return []
        return _until(self.end, drafts[: max(min(self.drafter.count, request.left - 1), 0)])

    def _sample(self, request: Request, logits: torch.Tensor) -> int:
        wide = logits.cpu().double()
        weights = torch.softmax((wide - wide.max()) / self.temperature, 0)
        return int(torch.multinomial(weights, 1, generator=request.generator))


@frozen
class _Part:
    """A step's piece of a request, from row `row` on; `last`: with its last known token, so that it says the next."""

    request: Request
    piece: Piece
    row: int
    last: bool

    @property
    def wanted(self) -> range:
        """The rows whose logits count: those of the last known token and of the drafts behind it."""
        end = self.row + len(self.piece.tokens)
        return range(end - 1 - len(self.request.drafts) if self.last else end, end)


def _until(end: frozenset[int], tokens: Sequence[int]) -> list[int]:
    """Tokens up to the first of `end`, with it."""
    for count, token in enumerate(tokens, 1):
        if token in end:
            return list(tokens[:count])
    return list(tokens)


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
