"""Peers that are installed beside the environment, by `make bench-peers`: each in a process of its own, on our core.

A peer changes torch when it is imported, and nothing else is to be changed.  So its process has the same torch, finds
the peer behind all else, makes its own random inputs of the sizes that it is told, holds what it computes against the
formula, and then calls it as often as it is asked to and says how long that took: its turns stand between ours.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import define, field

from mla_fx.dtypes import DTYPES

#: Where they are installed.
PEERS = Path(sys.prefix) / "share" / "mla_fx" / "peers"
LATENT, ROPE, SCALE = 512, 64, 192**-0.5


def installed() -> list[str]:
    """The names of peers that there are."""
    return [name for name in ("zentorch",) if (PEERS / name).is_dir()]


@define(eq=False)
class Apart:
    """A function in another process, which times itself: `seconds(calls)` is what a call took on its clock."""

    peer: str
    sizes: dict[str, Any]
    process: Any = field(init=False)

    def __attrs_post_init__(self) -> None:
        path = os.pathsep.join([*filter(None, sys.path), str(PEERS)])
        command = [sys.executable, "-m", "tests.benchmarks.apart", self.peer, json.dumps(self.sizes)]
        self.process = subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": path}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def seconds(self, calls: int) -> float:
        """Of one of so many calls; raises `RuntimeError` where the process has ended."""
        print(calls, file=self.process.stdin, flush=True)
        said = self.process.stdout.readline()
        if not said:
            raise RuntimeError(f"{self.peer}: its process ended with {self.process.wait()}")
        return float(said)

    def __call__(self) -> None:
        self.seconds(1)

    def __del__(self) -> None:
        self.process.stdin.close()  # at which it ends
        self.process.wait()


def attention(peer: str, heads: int, lengths: Sequence[int], dtype: str) -> Apart:
    """One new token of each request over so many keys."""
    sizes = {"heads": heads, "lengths": [*lengths], "dtype": dtype, "threads": torch.get_num_threads()}
    return Apart(peer, sizes)


def zentorch(heads: int, lengths: Sequence[int], dtype: str) -> Callable[[], None]:
    """AMD's attention, with heads as rows; values are the keys, of which latents count."""
    importlib.import_module("zentorch")
    kernel, draw = torch.ops.zentorch.zentorch_sdpa, torch.Generator().manual_seed(0)
    q, *keys = (torch.randn(1, 1, rows, LATENT + ROPE, generator=draw).to(DTYPES[dtype]) for rows in (heads, *lengths))

    def call() -> None:
        for k in keys:
            kernel(q, k, k, scale=SCALE)

    found, wide = kernel(q, keys[0], keys[0], scale=SCALE)[0].double(), keys[0].double()
    right = torch.softmax(q.double() @ wide.mT * SCALE, -1) @ wide
    assert (found - right).abs().max() <= 0.05 * right.abs().max(), "zentorch computes something else"
    return call


def main() -> None:
    """Answer each number of calls with the seconds of one."""
    peer, sizes = sys.argv[1], json.loads(sys.argv[2])
    threads = sizes.pop("threads")
    torch.set_num_threads(threads)
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever a peer prints
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asks is told, and ends this by closing the pipe
    clock = time.thread_time if threads == 1 else time.perf_counter
    with torch.no_grad():
        call = {"zentorch": zentorch}[peer](**sizes)
        for line in sys.stdin:
            start = clock()
            for _ in range(int(line)):
                call()
            print((clock() - start) / int(line), file=answers, flush=True)


if __name__ == "__main__":
    main()
