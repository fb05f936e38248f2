"""The device of this process, opened for a probe, in a group of processes where torchrun has started several."""

import contextlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib import import_module
from typing import Final

import torch
import torch.distributed as dist
from attrs import evolve

from mla_fx.backends.ascend import require_torch_npu
from mla_fx.backends.ascend.calls import release
from mla_fx.backends.ascend.probe.point import About, Site

#: What decides how torch_npu, CANN and HCCL run; every other variable of HCCL and of Ascend is told too.
_TOLD: Final = ("TASK_QUEUE_ENABLE", "PYTORCH_NPU_ALLOC_CONF", "HCCL_OP_EXPANSION_MODE", "HCCL_DETERMINISTIC")
_PREFIXES: Final = ("HCCL_", "ASCEND_", "ACL_")
NOT_SET: Final = "not set"


def processes() -> int:
    """How many torchrun has started, of which this is one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextlib.contextmanager
def opened(*, emulated: bool, cann: str | None = None) -> Iterator[Site]:
    """The device, alone or in a group; raises `InputError` where there is none."""
    emulator = None
    if emulated:
        emulator = import_module("mla_fx.backends.ascend.emulator").emulate(cann=cann)
    else:
        require_torch_npu()
    npu = torch.get_device_module("npu")
    npu.set_device(int(os.environ.get("LOCAL_RANK", "0")) % npu.device_count())
    played = release.number(emulator.release.version) if emulator else release.cann()
    site = Site(played, emulator)
    if processes() == 1:
        yield site
        return
    dist.init_process_group("gloo", timeout=timedelta(hours=1))  # HCCL gives up before, after half of that
    try:
        yield grouped(site)
    finally:
        dist.destroy_process_group()


def grouped(site: Site) -> Site:
    """Hosts talk by gloo whatever the devices do; a group of devices that cannot be made leaves them alone."""
    site = evolve(site, host=dist.group.WORLD, rank=dist.get_rank(), ranks=dist.get_world_size())
    try:
        return evolve(site, group=dist.new_group(backend="hccl"))
    except Exception as error:
        return evolve(site, alone=f"no group of devices can be made: {error}")


def about(site: Site) -> About:
    """What is there; what cannot be told says so."""
    npu, wheel = torch.get_device_module("npu"), import_module("torch_npu")
    emulated = site.emulator is not None
    versions = {
        "torch": torch.__version__,
        "torch_npu": wheel.__version__,
        "CANN": _said(lambda: site.emulator.release.version if emulated else npu.utils.get_cann_version()),
        "device": _said(lambda: f"{npu.get_device_name()}{', emulated' if emulated else ''}"),
        "devices": _said(lambda: str(npu.device_count())),
        "processes": str(site.ranks),
    }
    names = {*_TOLD, *(name for name in os.environ if name.startswith(_PREFIXES))}
    return About(versions, {name: os.environ.get(name, NOT_SET) for name in sorted(names)}, site.cann)


def _said(ask: Callable[[], str]) -> str:
    try:
        return str(ask()) or "not told"
    except Exception as error:
        return f"not told ({type(error).__name__})"
