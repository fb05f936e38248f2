"""The releases of CANN that the emulator plays, and in what they differ for the operators here.

Read from the tiling and kernel sources of ops-transformer and ops-nn 8.5.0, 9.0.0 and 9.1.0, for an A2.  What is not
listed is the same in all three, and stands with the operator.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from attrs import frozen

from mla_fx.effects import InputError


@frozen(kw_only=True)
class Release:
    """One release: what `aclsysGetCANNVersion` says, and the limits of that release."""

    version: str
    #: npu_attention_update: the most parts.
    parts: int
    #: npu_transpose_batchmatmul: what K and N must be a multiple of.
    multiple: int
    #: npu_transpose_batchmatmul: plain calls take K * B from 65536 on, and a weight [B, N, K] by perm_x2 (0, 2, 1).
    any_batch: bool
    #: npu_moe_init_routing_v2: the kernel for small batches copies rows where active_num is -1, and the operator takes
    #: any other active_num, cumulative counts and no counts.  Before, -1 leaves the rows unwritten.
    routes_all: bool


RELEASES: Final[Mapping[str, Release]] = MappingProxyType(
    {
        "8.5": Release(version="8.5.0", parts=16, multiple=128, any_batch=False, routes_all=False),
        "9.0": Release(version="9.0.0", parts=16, multiple=16, any_batch=False, routes_all=True),
        "9.1": Release(version="9.1.0", parts=128, multiple=1, any_batch=True, routes_all=True),
    }
)
NEWEST: Final = "9.1"


def release(cann: str) -> Release:
    """The release of that name; raises `InputError`."""
    if cann not in RELEASES:
        raise InputError(f"cann: must be one of {', '.join(RELEASES)}: got {cann}")
    return RELEASES[cann]
