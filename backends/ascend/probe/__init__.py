"""The first day on hardware: seventeen questions to an NPU, each held against the host.

    for found in run(site, POINTS): ...       # see `run`; `mla-fx probe` prints what it finds

Each is something that the backend builds on, or goes out of the way of, and
that only hardware can tell; `README.md` in this folder lists them.  Nothing is
changed: tensors are made and dropped.  Over the emulated CANN the same runs,
and says what the release that is played is known to do.
"""

from typing import Final

from mla_fx.backends.ascend.probe import attention, eight, experts, group, products, programs
from mla_fx.backends.ascend.probe.point import About as About
from mla_fx.backends.ascend.probe.point import Case as Case
from mla_fx.backends.ascend.probe.point import Found as Found
from mla_fx.backends.ascend.probe.point import Outcome as Outcome
from mla_fx.backends.ascend.probe.point import Point as Point
from mla_fx.backends.ascend.probe.point import Site as Site

#: By number.
POINTS: Final[tuple[Point, ...]] = (
    *attention.POINTS,
    *products.POINTS,
    *experts.POINTS,
    *group.POINTS,
    *programs.POINTS[:2],
    *eight.POINTS,
    *programs.POINTS[2:],
)
