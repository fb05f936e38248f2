"""Products of 16-bit weights against the library's own, in turn in one run, where the processor has none."""

import time
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from mla_fx.backends.cpu import products


def fastest(*functions: Callable[[], object], turns: int = 9) -> list[float]:
    """Seconds of a call of each, the least of so many turns."""
    least = [float("inf")] * len(functions)
    for _ in range(turns):
        for k, function in enumerate(functions):
            start = time.perf_counter()
            function()
            least[k] = min(least[k], time.perf_counter() - start)
    return least


@pytest.mark.bench
@pytest.mark.skipif(products.has(torch.bfloat16), reason="the processor multiplies bf16")
@pytest.mark.parametrize(("rows", "least"), [(8, 1.0), (64, 2.0)])
def test_rows_of_a_prompt(rows: int, least: float) -> None:
    """From `products.ROWS` rows on it is no slower; with 64 rows, at 2048 x 2048, 5 times as fast was seen."""
    x, weight = torch.randn(rows, 2048).bfloat16(), torch.randn(2048, 2048).bfloat16()
    library, ours = fastest(lambda: functional.linear(x, weight), lambda: products.linear(x, weight))
    assert library / ours >= least, f"{library / ours:.2f} times as fast with {rows} rows"
