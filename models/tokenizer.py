"""Text to tokens and back, as transformers 4 reads a checkpoint directory.

The vocabulary is in `tokenizer.json`, or in `tiktoken.model`.  What is put around a text stands in one of two files:
where `tokenizer_config.json` names Llama's tokenizer, as DeepSeek's does, `add_bos_token` and `add_eos_token` decide,
which are true and false unless they are there; with any other class, `tokenizer.json` decides by itself.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from attrs import frozen
from tokenizers import AddedToken
from tokenizers import Tokenizer as _Tokenizer

from mla_fx.effects import InputError
from mla_fx.models.chat import ChatTemplate, Message, load_chat_template
from mla_fx.models.files import read_object
from mla_fx.models.tiktoken import load_tiktoken

#: Fields of tokenizer_config.json that name a token, and what they are in Llama's class where they are not there.
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": None, "pad_token": None}


@frozen
class Around:
    """Tokens that are put in front of a text and behind it, and which file says so."""

    front: tuple[int, ...]
    behind: tuple[int, ...]
    file: str


class Tokenizer:
    """The tokenizer of a checkpoint directory.

    `around` says what `encode` puts around a text, `special` which tokens `decode` leaves out.
    """

    around: Around
    special: frozenset[int]

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        config = read_object(self._directory / "tokenizer_config.json")
        self._config = read_object(self._directory / "special_tokens_map.json") | config
        self._library, file = self._vocabulary()
        # transformers cuts and pads only where it is asked to, whatever the file says.
        self._library.no_truncation()
        self._library.no_padding()
        known = self._library.get_added_tokens_decoder()
        self.special = frozenset(number for number, token in known.items() if token.special)
        self.around = self._around(file)

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, with those that the tokenizer puts around it."""
        return [*self.around.front, *self._encode(text), *self.around.behind]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, without special ones."""
        text: str = self._library.decode(list(tokens))
        return text

    def name(self, token: int) -> str:
        """A token by its text, special ones by their name."""
        text: str = self._library.decode([token], skip_special_tokens=False)
        return text

    def chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> list[int]:
        """Tokens of a conversation by the checkpoint's template, by default up to where the model answers.

        `messages` are turns with "role" and "content"; `variables` go to the template.  Nothing is put around: the
        template writes what belongs there.
        """
        if self.template is None:
            raise InputError(
                f"chat_template: must be in chat_template.jinja or tokenizer_config.json of {self._directory}: got none"
            )
        text = self.template.render(messages, add_generation_prompt=add_generation_prompt, **variables)
        return self._encode(text)

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template; None where there is none."""
        names = {name: self._named(name) for name in NAMED}
        return load_chat_template(self._directory, self._config, {k: v for k, v in names.items() if v is not None})

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return ids

    def _vocabulary(self) -> tuple[_Tokenizer, str]:
        """The library's tokenizer, and the name of the file that it is made from."""
        path, tiktoken = self._directory / "tokenizer.json", self._directory / "tiktoken.model"
        if not path.is_file():
            if tiktoken.is_file():
                return load_tiktoken(tiktoken, self._config), tiktoken.name
            raise InputError(f"{path}: must be a readable file, or tiktoken.model must lie beside it: got neither")
        try:
            library = _Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more precise
            raise InputError(f"{path}: must be a tokenizer: {error}") from None
        _add(library, self._config.get("added_tokens_decoder") or {}, self._directory / "tokenizer_config.json")
        return library, path.name

    def _around(self, file: str) -> Around:
        kind, given = self._config.get("tokenizer_class"), {"add_bos_token", "add_eos_token"} & self._config.keys()
        # Without a class, transformers takes that of the architecture, which is Llama's for DeepSeek.
        if kind not in ("LlamaTokenizer", "LlamaTokenizerFast") and not (kind is None and given):
            return self._around_by_library(file)
        wanted: list[tuple[int, ...]] = []
        for switch, name, default in (("add_bos_token", "bos_token", True), ("add_eos_token", "eos_token", False)):
            value = self._config.get(switch, default)
            if not isinstance(value, bool):
                path = self._directory / "tokenizer_config.json"
                raise InputError(f"{path}: {switch} must be true or false: got {value!r}")
            wanted.append((self._number(name),) if value else ())
        front, behind = wanted
        return Around(front, behind, "tokenizer_config.json")

    def _around_by_library(self, file: str) -> Around:
        """What the library's own rule puts around: seen on a text that is one token."""
        inner = self._library.encode("0", add_special_tokens=False)
        whole = self._library.encode("0")
        marks = whole.special_tokens_mask
        if whole.ids == inner.ids:
            return Around((), (), file)
        front = next((n for n, mark in enumerate(marks) if not mark), len(marks))
        return Around(tuple(whole.ids[:front]), tuple(whole.ids[front + len(inner.ids) :]), file)

    def _named(self, name: str) -> str | None:
        """The text of a named token: a string, or an object with its content."""
        given = self._config.get(name, NAMED[name])
        return given.get("content") if isinstance(given, Mapping) else given

    def _number(self, name: str) -> int:
        token = self._named(name)
        number: int | None = None if token is None else self._library.token_to_id(token)
        if number is None:
            path = self._directory / "tokenizer_config.json"
            raise InputError(f"{path}: {name} must be a token of the vocabulary, since it is added: got {token!r}")
        return number


def _add(library: _Tokenizer, named: Mapping[str, Any], path: Path) -> None:
    """Tokens of tokenizer_config.json that tokenizer.json does not have, or has otherwise."""
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    try:
        tokens = {
            int(number): AddedToken(fields["content"], **{flag: fields[flag] for flag in flags if flag in fields})
            for number, fields in named.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InputError(f"{path}: added_tokens_decoder: must be from numbers to tokens: got {named!r}") from None
    for number, token in sorted(tokens.items()):
        library.add_tokens([token])
        found = library.token_to_id(token.content)
        if found != number:
            raise InputError(f"{path}: added_tokens_decoder: {token.content!r} must be token {number}: got {found}")
