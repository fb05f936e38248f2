"""History attention by plain torch, which computes where there is no kernel, and why torch's flash kernel does not."""

import math
import platform

import pytest
import torch

from mla_fx.backends.cpu import history_attention
from tests.backends.cpu.test_kernel_attention import DTYPES, SCALE, Case, hold


@pytest.mark.parametrize("dtype", [*DTYPES], ids=str)
@pytest.mark.parametrize("size", [7, 128])
def test_plain(dtype: torch.dtype, size: int) -> None:
    case = Case(16, (1, 2, 0, 1), (97, 700, 9, 0), dtype, size=size)
    hold(history_attention.plain(*case.q, *case.caches, case.table, case.queries, case.keys, scale=SCALE), case.exact())


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have another exponential")
def test_the_flash_kernel_in_16_bits_has_no_lse_to_merge_by() -> None:
    """When this fails, torch has mended it, and the plain form may be written with it."""
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, rows, 576, generator=draw).bfloat16() for rows in (128, 512))
    _, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, k, 0.0, False, scale=192**-0.5)
    exact = (q.double() @ k.double().mT / math.sqrt(192)).logsumexp(-1)
    assert (lse.double().view(-1) - exact.view(-1)).abs().max() > 5e-6
