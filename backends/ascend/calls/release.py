"""The release of CANN that is installed, for operators whose limits differ from one to the next."""

import re
import sys
from functools import cache
from typing import Final

import torch

#: The newest that the limits here were read from; taken where the wheel cannot tell.
NEWEST: Final = (9, 1)


def cann() -> tuple[int, int]:
    """Major and minor number, as the wheel reads them from what is installed."""
    return _told() if "torch_npu" in sys.modules else NEWEST


@cache
def _told() -> tuple[int, int]:
    return number(torch.npu.utils.get_cann_version())  # type: ignore[attr-defined]


def number(version: str) -> tuple[int, int]:
    """Of a version as the wheel words it.

    >>> [number(version) for version in ("8.5.0", "9.0.RC1", "")]
    [(8, 5), (9, 0), (9, 1)]
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else NEWEST
