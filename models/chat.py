"""A conversation as the text that a model was trained on, by the checkpoint's own template.

The template is Jinja, in `chat_template.jinja` or the field `chat_template` of `tokenizer_config.json`; it comes from
whoever made the checkpoint, so it runs in Jinja's sandbox, where it can change nothing and reach nothing but what it
is given.  What it may use besides is what transformers offers: `raise_exception`, `strftime_now`, `tojson` without
HTML, `break` and `continue`.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from attrs import frozen
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mla_fx.effects import InputError

#: A turn: "role" and "content", and whatever else the template knows.
Message = Mapping[str, Any]


@frozen
class ChatTemplate:
    """A template, the file it comes from, and the names of the tokens it may write."""

    source: str
    file: str
    tokens: Mapping[str, str]

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The text of a conversation, by default up to where the model answers.

        `variables` are those that the template knows besides, as `thinking` in DeepSeek-V3.1.
        """
        _check(messages)
        given = {"tools": None, "documents": None, **self.tokens, **variables}
        given |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        try:
            return _environment().from_string(self.source).render(given)
        except jinja2.TemplateError as error:
            raise InputError(f"{self.file}: the template refuses the messages: {error}") from None
        except Exception as error:  # a template is a program: it may divide by zero, or ask a list for a key
            raise InputError(f"{self.file}: the template failed: {type(error).__name__}: {error}") from None


def load_chat_template(directory: Path, config: Mapping[str, Any], tokens: Mapping[str, str]) -> ChatTemplate | None:
    """The template of a checkpoint directory, None where it has none; of several that have names, the default one."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return ChatTemplate(path.read_text(encoding="utf-8"), str(path), tokens)
    file = f"{directory / 'tokenizer_config.json'}: chat_template"
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}.get("default")
    if found is None:
        return None
    if not isinstance(found, str):
        raise InputError(f"{file}: must be a text, or a list with a text named 'default': got {found!r}")
    return ChatTemplate(found, file, tokens)


def _check(messages: Sequence[Message]) -> None:
    if isinstance(messages, str | Mapping) or not messages:
        raise InputError(f"messages: must be a list of at least one: got {messages!r}")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise InputError(f"messages: each must have a role and a content: got {message!r}")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False} | options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
