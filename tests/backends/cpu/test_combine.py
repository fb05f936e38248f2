"""The merge by the kernel: a row is the same bits whatever is merged beside it, and on any number of threads."""

import pytest
import torch

from mla_fx.backends import cpu
from mla_fx.backends.cpu import kernel
from mla_fx.backends.device import HOST, Run
from mla_fx.effects import ops


@pytest.mark.skipif(kernel.engine() is None, reason="plain torch rounds by place")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_row_is_the_same_alone_and_in_any_batch(dtype):
    rule, run = cpu.TABLE.rules[ops.Combine], Run(0, HOST)
    made = torch.Generator().manual_seed(5)
    parts = torch.randn(4, 37, 3, 520, generator=made).to(dtype)
    lse = torch.randn(4, 37, 3, generator=made) * 9
    lse[1, ::3] = -torch.inf

    def merged(rows):
        (out,) = rule(parts[:-1, rows], lse[:-1, rows], parts[-1, rows], lse[-1, rows], run=run, flat=False)
        return out

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = merged(slice(None))
        for token in range(37):
            assert torch.equal(merged([token]), whole[[token]])
        torch.set_num_threads(3)
        assert torch.equal(merged(slice(None)), whole)
    finally:
        torch.set_num_threads(before)
