"""Tokens as they come to text as it becomes certain, up to a stop string."""

from collections.abc import Sequence
from typing import Protocol

from attrs import define, field

from mla_fx.effects import InputError

#: What a decoder gives for bytes that are no character, or not yet one.
REPLACEMENT = "\ufffd"
#: As many tokens may be without text of their own before they are looked at less often.
_PATIENCE = 8


class Decoder(Protocol):
    """What makes text of tokens; a `Tokenizer`."""

    @property
    def special(self) -> frozenset[int]:
        """Tokens that are never text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens."""


def stop_strings(given: Sequence[str]) -> tuple[str, ...]:
    """Checked: a sequence of texts, none of them empty."""
    if isinstance(given, str | bytes) or not all(isinstance(one, str) and one for one in given):
        raise InputError(f"stop: must be a sequence of texts that are not empty: got {given!r}")
    return tuple(given)


@define
class TextStream:
    """The text of tokens that come one after the other.

    A character cut between two tokens waits for the second, and what may be the beginning of a stop string waits until
    it is known.  The pieces together are the text of all tokens, up to the first stop string; unless a decoder changes
    for good what it gave before: then what it gave stays, and the end of the text follows it.

    A token is decoded with those since the last text alone, so a text takes time in proportion to its length.
    """

    tokenizer: Decoder
    stop: tuple[str, ...] = field(default=(), converter=stop_strings)
    #: The stop string that ended the text.
    stopped: str | None = field(default=None, init=False)
    _pieces: list[str] = field(factory=list, init=False)
    _tokens: list[int] = field(factory=list, init=False)  # behind the text before the last: `_known` give the last
    _known: int = field(default=0, init=False)
    _look: int = field(default=1, init=False)  # how many tokens must wait for the next look
    _held: str = field(default="", init=False)  # may begin a stop string

    @property
    def text(self) -> str:
        """All that has been given so far."""
        return "".join(self._pieces)

    def add(self, tokens: Sequence[int], *, finished: bool = False) -> str:
        """The text that is new with these tokens; with the last ones, `finished`, whatever has waited."""
        if self.stopped is not None:
            return ""
        decoded = "".join(self._next(token) for token in tokens if token not in self.tokenizer.special)
        if finished:
            decoded += self._decode(last=True)
        new = self._before_stop(self._held + decoded, finished)
        if new:
            self._pieces.append(new)
        return new

    def _next(self, token: int) -> str:
        self._tokens.append(token)
        return self._decode() if len(self._tokens) - self._known >= self._look else ""

    def _decode(self, *, last: bool = False) -> str:
        waiting = len(self._tokens) - self._known
        if not waiting:
            return ""
        before = self.tokenizer.decode(self._tokens[: self._known])
        text = self.tokenizer.decode(self._tokens)
        certain = not text.endswith(REPLACEMENT) and text.startswith(before) and len(text) > len(before)
        if not certain and not last:
            # What goes on like this is looked at when it is twice as long, or the time would be quadratic.
            self._look = 2 * waiting if waiting >= _PATIENCE else waiting + 1
            return ""
        del self._tokens[: self._known]
        self._known, self._look = len(self._tokens), 1
        return text[len(before) :]

    def _before_stop(self, text: str, finished: bool) -> str:
        """What is certain to be before a stop string; the rest is held, or dropped where the string is there."""
        found = [(text.find(one), one) for one in self.stop if one in text]
        if found:
            place, self.stopped = min(found)
            self._held = ""
            return text[:place]
        kept = 0 if finished else max((_begun(text, one) for one in self.stop), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of a text begin a stop string.

    >>> _begun("so\\n", "\\n\\nQ:")
    1
    """
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
