"""What is asked of the engine and what it gives: requests, outputs, and the drafters it works with."""

import time
from collections.abc import Iterable, Sequence
from operator import index
from typing import Any, Literal, Protocol

from attrs import define, field, frozen

from mla_fx.effects import InputError
from mla_fx.models.sampling import Logprobs, Sampler, Sampling
from mla_fx.models.text import TextStream

#: Why a text ended: an end token or a stop string; its limit; given up; logits that are no numbers.
FinishReason = Literal["stop", "length", "abort", "error"]


@define(eq=False, kw_only=True)
class Request:
    """A prompt, how it is to be continued, and what has been generated behind it.

    `cached` of its tokens are in the caches; `reused` counts those that other requests had left there.  `drafts` go
    into its next step; `drafted` counts those that were verified, `accepted` those that became its tokens.  `arrived`
    and `first_token` are times of `time.perf_counter`.  `finish_reason` is None while it goes on, and `error` says
    what "error" was.
    """

    number: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = field(factory=Sampling)
    #: How many of the likeliest tokens `logprobs` has for each generated one; None: it stays empty.
    top_logprobs: int | None = None
    stream: TextStream | None = None
    tokens: list[int] = field(init=False)
    logprobs: list[Logprobs] = field(factory=list, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    error: str | None = field(default=None, init=False)
    cached: int = field(default=0, init=False)
    reused: int = field(default=0, init=False)
    drafts: list[int] = field(factory=list, init=False)
    drafted: int = field(default=0, init=False)
    accepted: int = field(default=0, init=False)
    arrived: float = field(factory=time.perf_counter, init=False)
    first_token: float | None = field(default=None, init=False)
    sampler: Sampler = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.sampler = Sampler(self.sampling, prompt=len(self.prompt))

    @property
    def new_tokens(self) -> list[int]:
        """What has been generated."""
        return self.tokens[len(self.prompt) :]

    @property
    def text(self) -> str:
        """The text of what has been generated, without a stop string; empty where the engine has no tokenizer."""
        return self.stream.text if self.stream is not None else ""

    @property
    def left(self) -> int:
        """How many tokens may still be generated."""
        return len(self.prompt) + self.max_new_tokens - len(self.tokens)

    @property
    def pending(self) -> int:
        """How many of its tokens are not in the caches; always at least one, for the last one says the next."""
        return len(self.tokens) - self.cached


@frozen
class Output:
    """What a step generated for a request, and whether that is finished.

    `text` is what became certain of its text, `logprobs` has an entry a token where the request asks for them.  A
    request that ends in an error may have no token.
    """

    request: Request
    tokens: tuple[int, ...]
    finished: bool
    text: str = ""
    logprobs: tuple[Logprobs, ...] = ()


@frozen
class Served:
    """What a step settled for a request: `count` positions from `start` on, rows `row` and on of its replica's step.

    `table` are the blocks it holds, `room` how many positions these are.
    """

    request: Request
    start: int
    count: int
    row: int
    table: tuple[int, ...]
    room: int
    replica: int = 0


class Drafter(Protocol):
    """Proposes tokens for the next step, which verifies them."""

    @property
    def count(self) -> int:
        """The most drafts a request gets."""

    def propose(self, served: Sequence[Served], hidden: Any) -> list[list[int]]:
        """Drafts behind the last token of each request, any number up to `count`.

        `hidden` are the step's hidden states of every rank here; row `served.row` + i of those of a rank of its
        replica stands at position `start` + i.  In a group every process asks, of the requests of all replicas, and
        must be answered alike.
        """


def prompt_tokens(given: Iterable[int], vocabulary: int) -> tuple[int, ...]:
    """A prompt as integers below `vocabulary`, at least one."""
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


def end_tokens(given: Iterable[int]) -> frozenset[int]:
    """Tokens that end a text, as integers of at least 0."""
    try:
        tokens = frozenset(index(token) for token in given)
    except TypeError:
        tokens = frozenset({-1})
    if min(tokens, default=0) < 0:
        raise InputError(f"end: must be a collection of tokens, each an integer of at least 0: got {given!r}")
    return tokens


def counted(name: str, given: Any, *, least: int) -> int:
    """An integer of any library, at least `least`."""
    try:
        count = index(given)
    except TypeError:
        count = least - 1
    if count < least:
        raise InputError(f"{name}: must be an integer of at least {least}: got {given!r}")
    return count
