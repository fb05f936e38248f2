"""How much memory loading takes."""

import json
import os
import subprocess
import sys

import pytest
import torch
from attrs import evolve
from safetensors.torch import save_file

from mla_fx.models import small_config, write_checkpoint
from mla_fx.models.quantize import scale_shape
from mla_fx.models.weights import expected

#: Loads in a process of its own for each case: what an earlier one freed would hide what a later one takes.  The least
#: of three counts: pages of the file that the system has not yet taken back are in the figure too.  What does not grow
#: with a rank's part is allowed by itself: pieces on their way, the tensors read at once, and the holes that malloc
#: leaves between them, 2 to 10 MB by where the heap begins.
PEAK = """
import os, sys, torch
from mla_fx.models import Checkpoint, Loader

def status(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))

def load(directory, dtype, quantization):
    checkpoint = Checkpoint.open(directory)
    return Loader(checkpoint=checkpoint, rank=0, ranks=2, dtype=dtype, quantization=quantization).model()

tiny, wide, fp8 = sys.argv[1:]
AGAIN = 3
for directory, dtype, quantization in (
    (wide, torch.float32, None), (wide, torch.float16, "w8a8"), (wide, torch.bfloat16, None), (fp8, torch.float16, None)
):
    for last in (False, False, True):
        if child := os.fork():
            ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert ended in (0, AGAIN)
            if ended == 0:
                break
            continue
        load(tiny, dtype, quantization)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        before = status("VmRSS")
        model = load(directory, dtype, quantization)
        peak = status("VmHWM") - before
        leaves = {leaf.data_ptr(): leaf.nbytes for leaf in torch.utils._pytree.tree_leaves(model)}
        own = sum(leaves.values())
        limit = int(1.1 * own) + (10 << 20)
        if peak >= limit and not last:
            os._exit(AGAIN)
        print(os.path.basename(directory), dtype, quantization, own, peak, limit, flush=True)
        os._exit(0)
"""


def test_loading_takes_little_more_memory_than_the_weights(tmp_path):
    """200 MB in bf16, no tensor of it a twentieth: whatever is converted, a tenth and 10 MiB above a rank's part."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the peak of resident memory cannot be reset: /proc/self/clear_refs is not writable")
    small = small_config()
    config = evolve(
        small,
        num_hidden_layers=12,
        num_nextn_predict_layers=0,
        vocab_size=2048,
        intermediate_size=1024,
        attention=evolve(small.attention, hidden_size=512, q_lora_rank=256, kv_lora_rank=128),
        moe=evolve(small.moe, n_routed_experts=16, moe_intermediate_size=288),
    )
    write_checkpoint(tmp_path / "tiny", small)
    for name, fp8 in (("wide", False), ("fp8", True)):
        (tmp_path / name).mkdir()
        tensors = {name: torch.ones(each.shape, dtype=torch.bfloat16) for name, each in expected(config).items()}
        if fp8:
            small_ones = [name for name in tensors if name.endswith(("proj.weight", "mqa.weight"))]
            scales = {f"{name}_scale_inv": torch.ones(scale_shape(tensors[name].shape)) for name in small_ones}
            ones = {name: torch.full(tensors[name].shape, 0x38, dtype=torch.uint8) for name in small_ones}
            tensors |= {name: each.view(torch.float8_e4m3fn) for name, each in ones.items()} | scales
        save_file(tensors, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(
            json.dumps(evolve(config, storage="fp8" if fp8 else None).to_json())
        )
    run = subprocess.run(
        [sys.executable, "-c", PEAK, *(str(tmp_path / name) for name in ("tiny", "wide", "fp8"))],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    for path in tmp_path.glob("*/model.safetensors"):
        path.unlink()
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == 4
    for line in lines:
        *_, own, peak, limit = line.split()
        assert int(peak) < int(limit), line
        assert int(own) > 40e6
