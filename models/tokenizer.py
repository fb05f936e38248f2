"""Text to tokens and back, from a checkpoint's `tokenizer.json`."""

from collections.abc import Sequence
from pathlib import Path

from attrs import define, field
from tokenizers import Tokenizer as _Tokenizer

from mla_fx.effects import InputError


class Tokenizer:
    """The `tokenizer.json` of a checkpoint directory."""

    def __init__(self, directory: str | Path) -> None:
        path = Path(directory) / "tokenizer.json"
        if not path.is_file():
            raise InputError(f"{path}: must be a readable file: got nothing")
        try:
            self._tokenizer = _Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more precise
            raise InputError(f"{path}: must be a tokenizer: {error}") from None

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, with those that the tokenizer puts around it."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, without special ones."""
        text: str = self._tokenizer.decode(list(tokens))
        return text


@define
class TextStream:
    """Tokens as they come to text as it becomes certain: a character cut between two tokens waits for the second.

    The pieces together are the text of all tokens, unless a decoder changes for good what it gave before; then what it
    gave stays, and the end of the text follows it.
    """

    tokenizer: Tokenizer
    tokens: list[int] = field(factory=list)
    shown: str = ""

    def add(self, tokens: Sequence[int], *, finished: bool = False) -> str:
        """The text that is new with these tokens; with the last ones, `finished`, whatever has waited."""
        self.tokens += tokens
        text = self.tokenizer.decode(self.tokens)
        if not finished:
            text = text.rstrip("\ufffd")
            if not text.startswith(self.shown):  # the decoder is of another mind about what came before: wait
                return ""
        new = text[len(self.shown) :]
        self.shown = text
        return new
