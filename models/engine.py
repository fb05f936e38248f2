"""Continuous batching: requests come and go, and every step serves all that run.

A step gives each running request its next tokens to process: one that decodes
its last token and the drafts behind it, one whose prompt is not filled in yet
a chunk of it, as far as the step's budget reaches.  Decoding goes first, then
prompts in the order of arrival, so a long prompt delays no text by more than a
step; drafts leave room for them, so they delay no prompt for ever.  When blocks
run out, the request that came last gives its blocks back and starts over later
from the tokens it has; nothing it said is lost, and the oldest always goes on.

Drafts are verified, not trusted: of the tokens that the model says behind each
draft, those count up to the first that is not the draft itself.  What a request
says at a position depends on the text before and, where it samples, on its seed
and the position, so drafts change nothing of it.  Source: speculative decoding
(arXiv 2211.17192); `sampling` has the case of a temperature above 0.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import zip_longest

import torch
from attrs import define, field, frozen

from mla_fx.effects import InputError
from mla_fx.models.blocks import BlockManager, OutOfBlocksError
from mla_fx.models.request import (
    Drafter,
    FinishReason,
    Output,
    Request,
    Served,
    counted,
    end_tokens,
    prompt_tokens,
)
from mla_fx.models.runner import Piece, Runner
from mla_fx.models.sampling import Logprobs, Sampling, logprobs
from mla_fx.models.text import Decoder, TextStream


@define(kw_only=True, eq=False)
class Engine:
    """Serves requests on a runner, at most `runner.shape.requests` at a time and `chunk` tokens a step.

    A text ends with a token of `end`, at its request's limit, or, where a `tokenizer` makes text of tokens, before one
    of its stop strings.  With `prefix_cache`, requests that begin alike share the blocks of what they have in common.
    Whatever runs came before whatever waits, and both are in the order of their numbers.
    """

    runner: Runner
    chunk: int = 64
    drafter: Drafter | None = None
    end: frozenset[int] = field(default=(), converter=end_tokens)
    tokenizer: Decoder | None = None
    prefix_cache: bool = True
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
        ahead = 0 if self.drafter is None else 1  # a drafter may keep a cache, as `MtpDrafter` does
        self.blocks = BlockManager(self.runner.sharding, shape.blocks, ahead)

    def __reduce__(self) -> str:
        raise TypeError("an engine has caches and executables of its process and cannot be pickled or copied: make one")

    @property
    def busy(self) -> bool:
        """Whether a request is running or waiting."""
        return bool(self.running or self.waiting)

    def add(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        top_logprobs: int | None = None,
    ) -> Request:
        """Queue a prompt; raises `InputError` for one that can never be served.

        `sampling` is greedy unless given.  A text ends before the first of the strings `stop`.  `top_logprobs` asks for
        the logprobs of each token and of as many of the likeliest ones.
        """
        tokens = prompt_tokens(prompt, self.runner.config.vocab_size)
        max_new_tokens = counted("max_new_tokens", max_new_tokens, least=1)
        if top_logprobs is not None:
            top_logprobs = counted("top_logprobs", top_logprobs, least=0)
        if sampling is not None and not isinstance(sampling, Sampling):
            raise InputError(f"sampling: must be a Sampling: got {sampling!r}")
        if stop and self.tokenizer is None:
            raise InputError(f"stop: must be empty where the engine has no tokenizer: got {stop!r}")
        stream = TextStream(self.tokenizer, stop) if self.tokenizer is not None else None
        self._must_fit(len(tokens) + max_new_tokens)
        request = Request(
            number=self._count,
            prompt=tokens,
            max_new_tokens=max_new_tokens,
            sampling=sampling or Sampling(),
            top_logprobs=top_logprobs,
            stream=stream,
        )
        self._count += 1
        self.waiting.append(request)
        return request

    def _must_fit(self, total: int) -> None:
        shape = self.runner.shape
        need, most = self.runner.sharding.blocks(total - 1), min(shape.blocks, shape.table_width)
        if need > most:
            raise OutOfBlocksError(
                f"blocks: prompt and max_new_tokens, {total - 1} positions without the last, need {need} blocks of "
                f"{self.blocks.unit}, and a request can have {most}"
            )
        limit = self.runner.config.max_position_embeddings
        if limit is not None and total > limit:
            raise InputError(
                f"max_new_tokens: with the prompt must be at most max_position_embeddings, {limit}: got {total}"
            )

    def abort(self, request: Request) -> None:
        """Give up a request and its blocks; what it generated stays with it."""
        if request in self.running:
            self._finish(request, "abort")
        elif request in self.waiting:
            self.waiting.remove(request)
            request.finish_reason = "abort"
        else:
            raise InputError(f"request: must be running or waiting: got number {request.number}")

    def run(self) -> Iterator[Output]:
        """Step until all requests are finished; nothing is given any more of one that was aborted."""
        while self.busy:
            for output in self.step():
                if output.request.finish_reason != "abort":
                    yield output

    def step(self) -> list[Output]:
        """One step of the model for all that run; what it generated."""
        parts = self._plan()
        if not parts:
            return []
        wanted = [row for part in parts for row in part.wanted]
        filling = any(len(part.piece.tokens) > 1 + len(part.request.drafts) for part in parts)
        logits, hidden = self.runner.forward([part.piece for part in parts], wanted, filling=filling)
        outputs, settled = self._accept(parts, _Said(logits))
        if self.drafter is not None and settled:
            served = [self._served(part, count) for part, count in settled]
            proposed = self.drafter.propose(served, hidden)
            if len(proposed) != len(served):
                raise InputError(f"drafts: must have a list for each of {len(served)} requests: got {len(proposed)}")
            for one, drafts in zip(served, proposed, strict=True):
                one.request.drafts = self._allowed(one.request, drafts)
        for part, _ in settled:
            self._share(part.request)
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
                self.blocks.allocate(request.number, len(request.tokens), request.tokens if self.prefix_cache else ())
            except OutOfBlocksError:
                return
            request.cached = self.blocks.shared(request.number)
            request.reused += request.cached
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

    def _accept(self, parts: list["_Part"], said: "_Said") -> tuple[list[Output], list[tuple["_Part", int]]]:
        """Take over what the model says; requests that are finished give their blocks back.

        Also the parts of those that go on, each with how many positions are settled.
        """
        outputs: list[Output] = []
        settled: list[tuple[_Part, int]] = []
        at = 0
        for part in parts:
            request, count = part.request, len(part.piece.tokens)
            if part.last:
                rows = range(at, at + 1 + len(request.drafts))
                at = rows.stop
                output, reason = self._take(request, said, rows)
                if not output.tokens and reason is None:
                    continue  # nothing is settled: the same again in the next step, without drafts
                outputs.append(output)
                count -= len(rows) - len(output.tokens)
            else:
                reason = None
            request.cached += count
            if reason is None:
                settled.append((part, count))
            else:
                self._finish(request, reason)
        return outputs, settled

    def _take(self, request: Request, said: "_Said", rows: range) -> tuple[Output, FinishReason | None]:
        """Add tokens to a request, up to the first that is not the draft at its place, or that ends the text."""
        drafts, request.drafts = request.drafts, []
        new: list[int] = []
        logs: list[Logprobs] = []
        text = ""
        reason: FinishReason | None = None
        request.drafted += len(drafts)
        for row, draft in zip_longest(rows, drafts):
            if not said.finite[row]:
                # A row attends to the drafts behind it with weight 0, and 0 times NaN is NaN: only without drafts is
                # it known whose fault this is.
                if not drafts:
                    request.error = f"logits: must be finite, and are not behind {len(request.tokens)} tokens"
                    reason = "error"
                break
            token = said.token(row, request)
            if request.top_logprobs is not None:
                logs.append(logprobs(said.row(row), token, request.top_logprobs))
            request.tokens.append(token)
            new.append(token)
            if request.first_token is None:
                request.first_token = time.perf_counter()
            reason = self._ended(request)
            if request.stream is not None:
                text += request.stream.add([token], finished=reason is not None)
                reason = "stop" if request.stream.stopped is not None else reason
            request.accepted += token == draft
            if reason is not None or token != draft:
                break
        if reason == "error" and request.stream is not None:
            text += request.stream.add([], finished=True)
        request.logprobs += logs
        return Output(request, tuple(new), reason is not None, text, tuple(logs)), reason

    def _ended(self, request: Request) -> FinishReason | None:
        if request.tokens[-1] in self.end:
            return "stop"
        return "length" if request.left == 0 else None

    def _finish(self, request: Request, reason: FinishReason) -> None:
        # A drafter has not seen the last step of a text that is finished, so what that filled is not whole.
        if reason in ("stop", "length") and self.drafter is None:
            self._share(request)
        request.finish_reason = reason
        self.running.remove(request)
        self.blocks.free(request.number)

    def _share(self, request: Request) -> None:
        if self.prefix_cache:
            self.blocks.fill(request.number, request.tokens, request.cached)

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
        drafts = drafts[: max(min(self.drafter.count, request.left - 1), 0)]
        ends = (place for place, draft in enumerate(drafts, 1) if draft in self.end)
        return list(drafts[: next(ends, len(drafts))])


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


@define(eq=False)
class _Said:
    """A step's logits [rows, V], where the backend has them; a row comes to the host where a request needs it whole."""

    logits: torch.Tensor
    finite: list[bool] = field(init=False)
    _best: list[int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._best = self.logits.argmax(1).tolist()
        # A number less itself is 0 unless it is infinite or none: in three operators that every device has.
        self.finite = (self.logits - self.logits == 0).all(1).tolist()

    def row(self, row: int) -> torch.Tensor:
        """One row on the host."""
        return self.logits[row].cpu()

    def token(self, row: int, request: Request) -> int:
        """The token of a request behind its text so far."""
        if request.sampling.plain:
            return self._best[row]
        return request.sampler.choose(self.row(row), request.tokens)
