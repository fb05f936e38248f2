"""What a step takes of the system, in a process of its own: memory at its peak, and pages that it gets anew."""

import ctypes
import resource
import subprocess
import sys
from collections.abc import Callable

import torch

from mla_fx import MlaConfig, backends, orchestrations
from mla_fx.cli_backend import keep_freed
from mla_fx.effects import schedule
from tests.setups import Setup
from tests.test_imports import ROOT

MIB = 1 << 20
#: Attention as DeepSeek-V3 has it, and little else.
CONFIG = MlaConfig(
    hidden_size=256,
    num_attention_heads=128,
    q_lora_rank=64,
    kv_lora_rank=512,
    qk_nope_head_dim=16,
    qk_rope_head_dim=64,
    v_head_dim=16,
)


def step_of(config: MlaConfig, dtype: str, tokens: int, history: int) -> Callable[[int], None]:
    """A step of one request on one rank, as a function of its history, up to `history`."""
    setup = Setup(
        ranks=1, requests=1, tokens=tokens, block_size=128, table_width=history // 128 + 1, dtype=dtype, config=config
    )
    run = setup.compiled(backends.get("cpu"), schedule(setup.step, orchestrations.attention_aside))
    caches, hidden = setup.caches(), setup.hidden()
    batches = {length: setup.batches(history=(length,), query=(tokens,)) for length in (128, history)}
    return lambda length: run(caches, hidden, batches[length]) and None


def resident(what: str) -> int:
    """Bytes of this process that lie in memory now, "VmRSS", or did at most, "VmHWM"."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(what))


def peak(dtype: str) -> int:
    """Bytes that a step over 32k takes at most, beyond what lies in memory before: cache, weights and code."""
    step = step_of(CONFIG, dtype, 1, 32768)
    step(128)  # what a first step makes for good, and the code that it loads
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)  # what was freed would be taken again, and nobody would see it
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")  # the peak is that from here on
    before = resident("VmRSS")
    step(32768)
    return resident("VmHWM") - before


def pages(step: Callable[[int], None]) -> int:
    """The fewest pages that a step gets anew."""
    found = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        step(128)
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(found)


def main() -> None:
    """Both peaks, and pages of a step of large values before and after freed memory is kept."""
    torch.set_num_threads(1)
    print(*(peak(dtype) for dtype in ("bf16", "fp32")))
    step = step_of(CONFIG, "fp32", 64, 128)  # values of 70 MiB: of less than 64 glibc keeps most itself, in the end
    print(pages(step), keep_freed(), step(128), pages(step))


def test_memory_and_pages():
    """At 128 heads and 32k a step takes less than 64 MiB; it gets no pages anew where freed memory is kept."""
    command = [sys.executable, "-m", "tests.backends.test_kept_memory"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    peaks, (anew, kept, _, after) = (line.split() for line in found.stdout.splitlines())
    assert all(MIB // 4 < int(taken) < 64 * MIB for taken in peaks), peaks
    if kept == "True":  # else there is another C library
        assert int(anew) >= 1000 and int(after) <= 50, (anew, after)


if __name__ == "__main__":
    main()
