"""On Ascend through torch_npu: the operators of CANN where one does what an op says, plain torch beside them.

Every limit of an operator is a check of ours, with an error that names field,
rule and value, before the call: the meta kernels check next to nothing, and
CANN answers with a number.  Rules create no stream and no event; they run on
the stream that is current (see `mla_fx.backends.torch_streams`).  Importing
this package does not import torch_npu.

What is here has run on the emulated CANN of `emulator`, on no NPU so far.
Routed experts and 8-bit weights have no rules here yet: a program with them is
refused when it is compiled.
"""

if __name__ != "mla_fx.backends.ascend":  # reached as a top-level name from the checkout
    raise ImportError(f"import this package as 'mla_fx.backends.ascend', not {__name__!r}")

from collections.abc import Mapping
from importlib import import_module
from typing import Final

import torch

from mla_fx.backends.backend import Rule, rules_of
from mla_fx.effects import InputError, Op

#: Op to rule.  A collective's rule is a generator (see `mla_fx.backends.torch_streams`).
RULES: Final[Mapping[type[Op], Rule]] = rules_of(__name__)


def require_torch_npu() -> None:
    """Import torch_npu; raises `InputError` saying what to install where it is missing or finds no NPU."""
    advice = (
        "backend: ascend needs torch_npu==2.13.0 (pip install 'mla-fx[ascend]') and CANN with an NPU; "
        "without one, call mla_fx.backends.ascend.emulator.emulate() first"
    )
    try:
        import_module("torch_npu")
    except ImportError as error:
        raise InputError(f"{advice}: got {error}") from None
    if not torch.get_device_module("npu").is_available():
        raise InputError(f"{advice}: got no NPU")
