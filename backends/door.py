"""The door of an executable: what of torch's modes and transforms around a call is refused, and what is shut out.

An executable runs rules on memory: it cannot be transformed (`torch.func`),
recorded by `torch.jit.trace` or `make_fx`, or run on fake tensors, and says so.
It can be called under autocast, whose casts would change its numbers and do not
reach inside; in inference mode, or with states that were made in it; and from
compiled code, which breaks its graph around the call.
"""

from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from mla_fx.effects import InputError


def refuse_transforms() -> None:
    """Raise `InputError` where a call would be recorded or transformed."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise InputError("an executable must be called outside of torch.func transforms: got a call inside of one")
    if torch._C._is_tracing():
        raise InputError("an executable must be called outside of torch.jit.trace: got a call inside of it")
    mode = _get_current_dispatch_mode()
    if mode is not None and type(mode).__name__ in ("FakeTensorMode", "ProxyTorchDispatchMode", "FunctionalTensorMode"):
        raise InputError(f"an executable must run on real tensors: got a call under {type(mode).__name__}")


def special(device: str, *, inference: bool) -> AbstractContextManager[Any] | None:
    """What a body runs in beside no gradients, None for nothing: autocast off, inference mode where states want it."""
    inference = inference and not torch.is_inference_mode_enabled()
    casts = torch.is_autocast_enabled("cpu") or (device != "cpu" and torch.is_autocast_enabled(device))
    if not casts and not inference:
        return None
    stack = ExitStack()
    for kind in {"cpu", device}:
        stack.enter_context(torch.autocast(kind, enabled=False))
    if inference:
        stack.enter_context(torch.inference_mode())
    return stack
