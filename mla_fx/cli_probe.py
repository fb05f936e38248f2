"""`mla-fx probe`: what an NPU does of what the backend builds on, alone or under torchrun."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mla_fx.backends.ascend.probe import POINTS, About, Found, Site
from mla_fx.backends.ascend.probe.apart import apart
from mla_fx.backends.ascend.probe.report import closing, document, heading, lacking, merged, section
from mla_fx.backends.ascend.probe.run import run
from mla_fx.backends.ascend.probe.site import about, opened, processes
from mla_fx.effects import InputError


def probe(options: argparse.Namespace) -> int:
    """Ask, print as answers come, write the report; 1 where something does not hold that the backend rests on."""
    if options.cann and not options.emulate:
        raise InputError(f"--cann: is for --emulate: got --cann {options.cann}")
    if options.json is not None and (Path(options.json).is_dir() or not Path(options.json).absolute().parent.is_dir()):
        raise InputError(f"--json: must be a file in a folder that is there: got {options.json}")
    if not options.emulate and processes() == 1:
        return _told(options, apart(POINTS))
    with opened(emulated=options.emulate, cann=options.cann) as site:
        return _told(options, _here(site) if site.host is None else _together(site))


def _here(site: Site) -> Iterator[About | Found]:
    yield about(site)
    yield from run(site, POINTS)


def _together(site: Site) -> Iterator[About | Found]:
    """Every rank asks its own device; the first tells what came of all."""
    mine, every = list(run(site, POINTS)), [None] * site.ranks
    dist.all_gather_object(every, mine, group=site.host)
    if site.rank == 0:
        yield about(site)
        yield from merged(every)  # type: ignore[arg-type]


def _told(options: argparse.Namespace, said: Iterator[About | Found]) -> int:
    """Print what is said, point by point, and write it where the options say."""
    there = next(said, None)
    if not isinstance(there, About):
        return 0  # another rank tells
    print("\n".join(heading(there)), flush=True)
    found: list[Found] = []
    for point in POINTS:
        mine: list[Any] = [next(said) for _ in point.cases]
        print("\n".join(section(point, mine, there.cann)), flush=True)
        found += mine
        if options.json is not None:  # whatever becomes of the next one
            _write(options.json, document(POINTS, there, found))
    for _ in said:
        pass  # it ends by itself, not by being thrown away
    print(f"\n{closing(POINTS, found, there.cann)}")
    return 1 if lacking(POINTS, found, there.cann) else 0


def _write(path: str, report: dict[str, Any]) -> None:
    try:
        Path(path).write_text(json.dumps(report, indent=1) + "\n")
    except OSError as error:
        raise InputError(f"--json: must be a file that can be written: got {error}") from None
