"""`python -m mla_fx.backends.ascend.emulator`: run a script or a module over the emulated CANN, unmodified."""

import argparse
import runpy
import sys
from collections.abc import Sequence

from mla_fx.backends.ascend.emulator import emulate
from mla_fx.backends.ascend.emulator.build import install
from mla_fx.backends.ascend.emulator.releases import NEWEST, RELEASES
from mla_fx.effects import InputError


def main(arguments: Sequence[str]) -> int:
    """Emulate, then run what is named as if it were called by itself."""
    parser = argparse.ArgumentParser(
        prog="python -m mla_fx.backends.ascend.emulator",
        description="Run a script or a module that uses torch_npu on a machine without an NPU.",
    )
    parser.add_argument("--seed", type=int, default=0, help="interleaves the streams (default 0)")
    parser.add_argument("--cann", choices=list(RELEASES), default=NEWEST, help=f"the release (default {NEWEST})")
    parser.add_argument("--install", action="store_true", help="get the torch_npu that it runs under, and end")
    parser.add_argument(
        "-m", dest="module", metavar="MODULE", nargs=argparse.REMAINDER, help="a module and its arguments"
    )
    parser.add_argument("script", nargs=argparse.REMAINDER, help="or a script and its arguments")
    options = parser.parse_args(arguments)
    command = options.module or options.script
    if not command and not options.install:
        parser.error("name a script, or a module with -m")
    try:
        if options.install:
            install()
            return 0
        emulate(seed=options.seed, cann=options.cann)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    sys.argv = list(command)
    if options.module:
        sys.path.insert(0, "")
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(command[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
