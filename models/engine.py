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

In a group of processes an engine runs in each, on the same requests: every
process makes the same calls, and plans the steps of all replicas.  What ranks
could see differently, whose last bits may differ, is decided once: the first
rank of a replica says the tokens, and the others are told (`Runner.decided`).
"""

import time
from bisect import insort
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from attrs import Factory, define, field, frozen

from mla_fx.effects import InputError
from mla_fx.models.blocks import BlockManager, OutOfBlocksError
from mla_fx.models.replica import Part, Replica
from mla_fx.models.request import (
    Drafter,
    FinishReason,
    Output,
    Request,
    counted,
    end_tokens,
    prompt_tokens,
)
from mla_fx.models.runner import Runner
from mla_fx.models.sampling import Logprobs, Sampling, logprobs
from mla_fx.models.snapshot import parted, plain, resumed
from mla_fx.models.text import Decoder, TextStream


@define(kw_only=True, eq=False)
class Engine:
    """Serves requests on a runner, at most `runner.shape.requests` a replica at a time and `chunk` tokens a step of it.

    A text ends with a token of `end`, at its request's limit, or, where a `tokenizer` makes text of tokens, before one
    of its stop strings.  With `prefix_cache`, requests that begin alike share the blocks of what they have in common.
    A request runs where the fewest do, of equals on the first replica, and what waits is admitted in the order of
    numbers: nobody behind the first comes before it.
    """

    runner: Runner
    chunk: int = Factory(lambda engine: engine.runner.chunk, takes_self=True)
    drafter: Drafter | None = None
    end: frozenset[int] = field(default=(), converter=end_tokens)
    tokenizer: Decoder | None = None
    prefix_cache: bool = True
    replicas: list[Replica] = field(init=False)
    waiting: deque[Request] = field(factory=deque, init=False)
    _ended: list[Request] = field(factory=list, init=False)  # in the step that is under way or was the last
    _count: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        shape, sharding = self.runner.shape, self.runner.sharding
        if not isinstance(self.chunk, int) or self.chunk < shape.requests:
            raise InputError(
                f"chunk: must be an integer of at least the requests of a step, {shape.requests}: got {self.chunk!r}"
            )
        ahead = 0 if self.drafter is None else 1  # a drafter may keep a cache, as `MtpDrafter` does
        self.replicas = [
            Replica(number, shape, self.chunk, BlockManager(sharding, shape.blocks, ahead), self.prefix_cache)
            for number in range(self.runner.replicas)
        ]
        self.runner.ready(drafts=self.drafter is not None, chunk=self.chunk)

    def __reduce__(self) -> str:
        raise TypeError("an engine has caches and executables of its process and cannot be pickled or copied: make one")

    @property
    def running(self) -> list[Request]:
        """The requests that run, replica after replica."""
        return [request for replica in self.replicas for request in replica.running]

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
        request = self._request(self._count, prompt, max_new_tokens, sampling, stop, top_logprobs)
        self._count += 1
        self.waiting.append(request)
        return request

    def _request(
        self,
        number: int,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling | None,
        stop: Sequence[str],
        top_logprobs: int | None,
    ) -> Request:
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
        return Request(
            number=number,
            prompt=tokens,
            max_new_tokens=max_new_tokens,
            sampling=sampling or Sampling(),
            top_logprobs=top_logprobs,
            stream=stream,
        )

    def _must_fit(self, total: int) -> None:
        shape, unit = self.runner.shape, self.replicas[0].blocks.unit
        need, most = self.runner.sharding.blocks(total - 1), min(shape.blocks, shape.table_width)
        if need > most:
            raise OutOfBlocksError(
                f"blocks: prompt and max_new_tokens, {total - 1} positions without the last, need {need} blocks of "
                f"{unit}, and a request can have {most}"
            )
        limit = self.runner.config.max_position_embeddings
        if limit is not None and total > limit:
            raise InputError(
                f"max_new_tokens: with the prompt must be at most max_position_embeddings, {limit}: got {total}"
            )

    def abort(self, request: Request) -> None:
        """Give up a request and its blocks; what it generated stays with it."""
        home = next((replica for replica in self.replicas if request in replica.running), None)
        if home is not None:
            self._finish(home, request, "abort")
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

    def snapshot(self) -> dict[str, Any]:
        """Requests as plain data, with which another engine goes on: what they asked for, and what they have said.

        All that run and wait, and those that ended in the last step, whether it gave its outputs or failed.  Nothing of
        caches: whoever goes on starts over from the tokens there are.
        """
        requests = sorted([*self._ended, *self.running, *self.waiting], key=lambda request: request.number)
        return {"count": self._count, "requests": [plain(request) for request in requests]}

    def restore(self, snapshot: dict[str, Any] | None) -> list[Request]:
        """The requests of a snapshot, in the order of their numbers; those that had not ended go on.

        Outputs have what comes behind what is there already.  In a group every process calls this, and the snapshot of
        rank 0 counts, whatever the others give: in a step that failed some may have come further.  Raises `InputError`
        on an engine that has had requests, and for a snapshot that this one cannot serve; then nothing has changed.
        """
        if self._count:
            raise InputError(f"restore: must come before any request: got an engine that has had {self._count}")
        told = self.runner.decided([snapshot] * self.runner.replicas)[0]
        if not isinstance(told, dict) or not told.keys() >= {"count", "requests"}:
            raise InputError(f"snapshot: must be what Engine.snapshot gave: got {told!r}")
        requests = [resumed(self._request(**asked), said) for asked, said in map(parted, told["requests"])]
        self._count = told["count"]
        self.waiting.extend(request for request in requests if request.finish_reason is None)
        return requests

    def step(self) -> list[Output]:
        """One step of the model for all that run; what it generated."""
        self._ended = []
        plans = self._plan()
        if not any(plans):
            return []
        logits, hidden = self.runner.forward(
            [[part.piece for part in parts] for parts in plans],
            [[row for part in parts for row in part.wanted] for parts in plans],
            filling=any(part.filling for parts in plans for part in parts),
        )
        with self.runner.reading():
            said = [None if one is None else _verdicts(parts, one) for parts, one in zip(plans, logits, strict=True)]
        outputs: list[Output] = []
        settled: list[tuple[Replica, Part, int]] = []
        for replica, parts, verdicts in zip(self.replicas, plans, self.runner.decided(said), strict=True):
            for part, verdict in zip(parts, verdicts, strict=True):
                self._accept(replica, part, verdict, outputs, settled)
        if self.drafter is not None and settled:
            self._draft(self.drafter, settled, hidden)
        for replica, part, _ in settled:
            replica.keep(part.request)
        return outputs

    def _plan(self) -> list[list[Part]]:
        """Parts of this step of each replica; takes blocks back where there are not enough, and admits who waits."""
        for replica in self.replicas:
            for request in replica.grow():
                insort(self.waiting, request, key=lambda one: one.number)
        while self.waiting:
            order = sorted(self.replicas, key=lambda replica: (len(replica.running), replica.number))
            if not any(replica.admit(self.waiting[0]) for replica in order):
                break
            self.waiting.popleft()
        return [replica.parts() for replica in self.replicas]

    # --- what it gave --------------------------------------------------------

    def _accept(
        self,
        replica: Replica,
        part: Part,
        verdict: "Verdict | None",
        outputs: list[Output],
        settled: list[tuple[Replica, Part, int]],
    ) -> None:
        """Take over what the model says of a part; a request that is finished gives its blocks back.

        One that goes on is `settled`, with how many positions are.
        """
        request, count = part.request, len(part.piece.tokens)
        reason: FinishReason | None = None
        if verdict is not None:
            rows = 1 + len(request.drafts)
            output, reason = self._take(request, verdict)
            if not output.tokens and reason is None:
                return  # nothing is settled: the same again in the next step, without drafts
            outputs.append(output)
            count -= rows - len(output.tokens)
        request.cached += count
        if reason is None:
            settled.append((replica, part, count))
        else:
            self._finish(replica, request, reason)

    def _take(self, request: Request, verdict: "Verdict") -> tuple[Output, FinishReason | None]:
        """Add tokens to a request, up to the first that ends the text."""
        drafts, request.drafts = request.drafts, []
        request.drafted += len(drafts)
        before, text, reason = len(request.tokens), "", None
        for token, draft in zip_longest(verdict.tokens, drafts[: len(verdict.tokens)]):
            request.tokens.append(token)
            if request.first_token is None:
                request.first_token = time.perf_counter()
            reason = self._ended_by(request)
            if request.stream is not None:
                text += request.stream.add([token], finished=reason is not None)
                reason = "stop" if request.stream.stopped is not None else reason
            request.accepted += token == draft
            if reason is not None:
                break
        if reason is None and not verdict.finite and not drafts:
            # A row attends to the drafts behind it with weight 0, and 0 times NaN is NaN: only without drafts is it
            # known whose fault this is.
            request.error = f"logits: must be finite, and are not behind {len(request.tokens)} tokens"
            reason = "error"
            text += request.stream.add([], finished=True) if request.stream is not None else ""
        new = tuple(request.tokens[before:])
        logs = verdict.logprobs[: len(new)]
        request.logprobs += logs
        return Output(request, new, reason is not None, text, logs), reason

    def _ended_by(self, request: Request) -> FinishReason | None:
        if request.tokens[-1] in self.end:
            return "stop"
        return "length" if request.left == 0 else None

    def _finish(self, replica: Replica, request: Request, reason: FinishReason) -> None:
        # A drafter has not seen the last step of a text that is finished, so what that filled is not whole.
        if reason in ("stop", "length") and self.drafter is None:
            replica.keep(request)
        request.finish_reason = reason
        replica.drop(request)
        self._ended.append(request)

    # --- drafts ----------------------------------------------------------------

    def _draft(self, drafter: Drafter, settled: Sequence[tuple[Replica, Part, int]], hidden: Any) -> None:
        served = [replica.served(part, count, drafter.count) for replica, part, count in settled]
        proposed = drafter.propose(served, hidden)
        if len(proposed) != len(served):
            raise InputError(f"drafts: must have a list for each of {len(served)} requests: got {len(proposed)}")
        for one, drafts in zip(served, proposed, strict=True):
            one.request.drafts = self._allowed(one.request, drafts, drafter.count)

    def _allowed(self, request: Request, drafts: Sequence[int], most: int) -> list[int]:
        """Drafts that may still count: one token comes without any, and nothing comes behind an end token."""
        vocabulary = self.runner.config.vocab_size
        for draft in drafts:
            if not isinstance(draft, int) or not 0 <= draft < vocabulary:
                raise InputError(f"drafts: each must be in 0..{vocabulary - 1}: got {draft!r}")
        if request.pending > 1 or not request.new_tokens:
            return []
        drafts = drafts[: max(min(most, request.left - 1), 0)]
        ends = (place for place, draft in enumerate(drafts, 1) if draft in self.end)
        return list(drafts[: next(ends, len(drafts))])


@frozen
class Verdict:
    """What the model says behind a request's text: tokens, up to the first that is not the draft at its place.

    `logprobs` has an entry for each where the request asks for them; not `finite`: what comes behind is no number.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]
    finite: bool


def _verdicts(parts: Sequence[Part], logits: torch.Tensor) -> list[Verdict | None]:
    """Of each part, from the logits [rows, V] that the parts want, where the backend has them; None: of one that fills.

    A row comes to the host, once, where a request needs it whole.
    """
    best = logits.argmax(1).tolist()
    # A number less itself is 0 unless it is infinite or none: in three operators that every device has.
    finite = (logits - logits == 0).all(1).tolist()
    found: list[Verdict | None] = []
    at = 0
    for part in parts:
        rows = range(at, at + len(part.wanted))
        at = rows.stop
        found.append(_verdict(part.request, rows, logits, best, finite) if part.last else None)
    return found


def _verdict(request: Request, rows: range, logits: torch.Tensor, best: list[int], finite: list[bool]) -> Verdict:
    tokens: list[int] = []
    logs: list[Logprobs] = []
    for row, draft in zip_longest(rows, request.drafts):
        if not finite[row]:
            return Verdict(tuple(tokens), tuple(logs), False)
        token = best[row]
        if not request.sampling.plain or request.top_logprobs is not None:
            whole = logits[row].cpu()
            if not request.sampling.plain:
                text = [*request.tokens, *tokens] if tokens else request.tokens
                token = request.sampler.choose(whole, text)
            if request.top_logprobs is not None:
                logs.append(logprobs(whole, token, request.top_logprobs))
        tokens.append(token)
        if token != draft:
            break
    return Verdict(tuple(tokens), tuple(logs), True)
