"""Interpreters by name: `reference` (float64, the definition), `cpu` (native dtypes), `ascend` (torch_npu), `cuda`."""

if __name__ != "mla_fx.backends":  # reached as a top-level name from the checkout
    raise ImportError(f"import this package as 'mla_fx.backends', not {__name__!r}")

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, Final

from mla_fx.backends.backend import Backend as Backend
from mla_fx.backends.backend import Executable as Executable
from mla_fx.backends.contract import ContractError as ContractError
from mla_fx.backends.device import Device as Device
from mla_fx.backends.device import Run as Run
from mla_fx.backends.device import device as device
from mla_fx.backends.membership import join as join
from mla_fx.backends.peers import PeerError as PeerError
from mla_fx.backends.prepared import Prepared as Prepared
from mla_fx.backends.rows import RunError as RunError
from mla_fx.backends.table import Collective as Collective
from mla_fx.backends.table import Fusion as Fusion
from mla_fx.backends.table import MissingRuleError as MissingRuleError
from mla_fx.backends.table import Rule as Rule
from mla_fx.backends.table import Table as Table
from mla_fx.backends.world import InProcess as InProcess
from mla_fx.backends.world import Processes as Processes
from mla_fx.backends.world import Sums as Sums
from mla_fx.backends.world import World as World
from mla_fx.effects import InputError
from mla_fx.layout import Layout


def _reference(world: World, adversary: int | None) -> Backend:
    table = import_module("mla_fx.backends.reference").TABLE
    return Backend("reference", table, world, dtype="fp64", adversary=adversary)


def _cpu(world: World, adversary: int | None) -> Backend:
    return Backend("cpu", import_module("mla_fx.backends.cpu").TABLE, world, adversary=adversary)


def _ascend(world: World, adversary: int | None) -> Backend:
    module = import_module("mla_fx.backends.ascend")
    module.require_torch_npu()
    return Backend("ascend", module.TABLE, world, device("npu"), adversary=adversary)


def _cuda(world: World, adversary: int | None) -> Backend:
    module = import_module("mla_fx.backends.cuda")
    module.require_gpu()
    return Backend("cuda", module.table(), world, device("cuda"), adversary=adversary)


#: Name to maker; a maker imports its rules when it is asked for, never before.
NAMED: Final[Mapping[str, Callable[[World, int | None], Backend]]] = MappingProxyType(
    {"reference": _reference, "cpu": _cpu, "ascend": _ascend, "cuda": _cuda}
)


#: No group: `dist.group.WORLD` is None before there is one.
_ALONE: Final[Any] = object()


def get(
    name: str, *, ranks: int | Layout = 1, adversary: int | None = None, group: Any = _ALONE, sums: Sums = "rank order"
) -> Backend:
    """The backend called `name`, running all `ranks` ranks in this process, or those of a `Layout`.

    With `group`, a group of `torch.distributed` of as many processes (on
    `ascend` made with "hccl", on the host with "gloo"), the process runs its
    own rank only, and all of them make the groups of the layout: arguments
    are lists of one entry, and so are results.  On `ascend` and `cuda` it
    takes the device of number LOCAL_RANK, which torchrun sets, and without
    that the current one; the first backend of a process decides, so it is
    made before the first collective.  `sums` over its ranks are taken in
    "rank order", which gives the bits of all ranks in one process, or left to
    the "transport" (see `Processes`).

    `adversary` is a seed: streams then run late and interleaved at random,
    memory is NaN until written and reused as early as the law allows.  The
    same seed gives the same interleaving.  On `ascend` that is for the emulator
    to do (`mla_fx.backends.ascend.emulator`).  Raises `InputError` for an
    unknown name, for what is no group or one of other processes, for `ascend`
    where torch_npu is missing or finds no NPU, for `cuda` where torch finds no
    NVIDIA GPU, and where there is no device of that number.
    """
    if name not in NAMED:
        raise InputError(f"backend: must be one of {', '.join(NAMED)}: got {name!r}")
    if group is _ALONE:
        return NAMED[name](InProcess(ranks), adversary)
    return NAMED[name](Processes(group, ranks, sums), adversary)
