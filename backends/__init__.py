"""Interpreters by name: `reference` (float64, the definition), `cpu` (native dtypes), `ascend` (torch_npu), `cuda`."""

if __name__ != "mla_fx.backends":  # reached as a top-level name from the checkout
    raise ImportError(f"import this package as 'mla_fx.backends', not {__name__!r}")

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, Final

from attrs import evolve

from mla_fx.backends.backend import Backend as Backend
from mla_fx.backends.backend import Executable as Executable
from mla_fx.backends.backend import MissingRuleError as MissingRuleError
from mla_fx.backends.backend import Rule as Rule
from mla_fx.effects import InputError


def _reference(ranks: int, adversary: int | None) -> Backend:
    rules = import_module("mla_fx.backends.reference").RULES
    return Backend("reference", rules, ranks=ranks, dtype="fp64", adversary=adversary)


def _cpu(ranks: int, adversary: int | None) -> Backend:
    return Backend("cpu", import_module("mla_fx.backends.cpu").RULES, ranks=ranks, adversary=adversary)


def _ascend(ranks: int, adversary: int | None) -> Backend:
    module = import_module("mla_fx.backends.ascend")
    module.require_torch_npu()
    return Backend("ascend", module.RULES, ranks=ranks, adversary=adversary, device="npu")


def _cuda(ranks: int, adversary: int | None) -> Backend:
    module = import_module("mla_fx.backends.cuda")
    module.require_gpu()
    return Backend("cuda", module.RULES, ranks=ranks, adversary=adversary, device="cuda")


#: Name to maker; a maker imports its rules when it is asked for, never before.
NAMED: Final[Mapping[str, Callable[[int, int | None], Backend]]] = MappingProxyType(
    {"reference": _reference, "cpu": _cpu, "ascend": _ascend, "cuda": _cuda}
)


def get(name: str, *, ranks: int = 1, adversary: int | None = None, group: Any = None) -> Backend:
    """The backend called `name`, running all `ranks` ranks of a group in this process.

    With `group`, a group of `torch.distributed` whose size is `ranks` (on
    `ascend` made with "hccl", on the host with "gloo"), the process runs its
    own rank only: arguments are lists of one entry, and so are results (see
    `mla_fx.backends.distributed`).

    `adversary` is a seed: streams then run late and interleaved at random,
    memory is NaN until written and reused as early as the law allows.  The
    same seed gives the same interleaving.  On `ascend` that is for the emulator
    to do (`mla_fx.backends.ascend.emulator`).  Raises `InputError` for an
    unknown name, for `ascend` where torch_npu is missing or finds no NPU, and
    for `cuda` where torch finds no NVIDIA GPU.
    """
    if name not in NAMED:
        raise InputError(f"backend: must be one of {', '.join(NAMED)}: got {name!r}")
    made = NAMED[name](ranks, adversary)
    if group is None:
        return made
    rules = import_module("mla_fx.backends.distributed").RULES
    return evolve(made, group=group, rules={**made.rules, **rules})
