"""What a rank serves on an emulated device: functions of a member, run by `tests.processes`."""

import torch

from mla_fx.backends.ascend.emulator import emulate
from tests.models import serving
from tests.models.serving import Served
from tests.processes import Member


def texts(member: Member, *, served: Served) -> tuple[list[list[int]], list[torch.Tensor]]:
    """As one of the ranks of a group."""
    emulate(seed=member.rank)
    return serving.texts(member, kind="hccl", served=served)


def alone(member: Member, *, served: Served) -> tuple[list[list[int]], list[torch.Tensor]]:
    """All ranks in this process."""
    emulate()
    return serving.together(served)
