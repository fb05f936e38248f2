"""`python -m mla_fx.backends.ascend.probe`: the cases of a probe in a process that may die of one (see `apart`).

Lines of JSON go into a pipe: what there is, the number of each case before it
runs, and what came of it.  After a fault the process ends at once, as what
tidies up behind it may wait for the device forever.
"""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from attrs import asdict

from mla_fx.backends.ascend.probe import POINTS, Point, Site
from mla_fx.backends.ascend.probe.run import brief, fault, run
from mla_fx.backends.ascend.probe.site import about, opened
from mla_fx.effects import InputError


def main(pipe: int, start: int, points: Sequence[Point], site: AbstractContextManager[Site]) -> None:
    """Tell `pipe` of the cases from number `start` on."""
    with os.fdopen(pipe, "w") as lines:

        def say(kind: str, what: Any) -> None:
            lines.write(json.dumps({kind: what}) + "\n")
            lines.flush()

        try:
            with site as here:
                say("about", asdict(about(here)))
                if why := fault():
                    raise InputError(f"device: must add numbers: got {why}")
                for found in run(here, points, start=start, begun=lambda number: say("begun", number)):
                    say("found", asdict(found))
                    if found.outcome.verdict == "faults":
                        os._exit(1)
        except InputError as error:
            say("error", str(error))
        except Exception as error:
            say("error", f"device: must be possible to open: got {brief(error)}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), POINTS, opened(emulated=False))
