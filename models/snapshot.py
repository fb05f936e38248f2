"""A request as plain data: what it asked for and what it has said, in what JSON has, and back.

What a request's sampler, text and blocks hold follows from its tokens, so nothing of it is written.
"""

from typing import Any, Final

from attrs import asdict

from mla_fx.models.request import Request
from mla_fx.models.sampling import Logprobs, Sampling

#: What a request asks for, as `Engine.add` is asked, and its number.
_ASKED: Final = ("number", "prompt", "max_new_tokens", "sampling", "stop", "top_logprobs")


def plain(request: Request) -> dict[str, Any]:
    """A request in numbers, texts, lists and dictionaries."""
    return {
        "number": request.number,
        "prompt": list(request.prompt),
        "max_new_tokens": request.max_new_tokens,
        "sampling": asdict(request.sampling),
        "stop": list(request.stream.stop) if request.stream is not None else [],
        "top_logprobs": request.top_logprobs,
        "new_tokens": list(request.new_tokens),
        "logprobs": [[logs.chosen, [list(pair) for pair in logs.top]] for logs in request.logprobs],
        "finish_reason": request.finish_reason,
        "error": request.error,
        "drafted": request.drafted,
        "accepted": request.accepted,
    }


def parted(written: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a request asked for, and the rest."""
    asked = {name: written[name] for name in _ASKED} | {"sampling": Sampling(**written["sampling"])}
    return asked, {name: value for name, value in written.items() if name not in _ASKED}


def resumed(request: Request, said: dict[str, Any]) -> Request:
    """A request as it was asked, with what it has said since."""
    request.tokens += said["new_tokens"]
    request.logprobs = [
        Logprobs(chosen, tuple((token, value) for token, value in top)) for chosen, top in said["logprobs"]
    ]
    request.finish_reason, request.error = said["finish_reason"], said["error"]
    request.drafted, request.accepted = said["drafted"], said["accepted"]
    if request.stream is not None:
        ended = request.finish_reason not in (None, "abort")
        for place, token in enumerate(said["new_tokens"], 1):
            request.stream.add([token], finished=ended and place == len(said["new_tokens"]))
    return request
