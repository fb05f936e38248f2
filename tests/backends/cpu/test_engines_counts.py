"""What the engines for bf16 execute on the emulated processor, against what the arithmetic needs at the least.

It is the same on any processor that has the instructions; how long they take there is not shown.
"""

from functools import cache

import pytest
import torch

from mla_fx.backends.cpu import kernel
from tests.backends.cpu import simd
from tests.backends.cpu.test_kernel_attention import Case, hold

pytestmark = pytest.mark.skipif(simd.why_not() is not None, reason=str(simd.why_not()))
ENGINES = ("avx512_bf16", "amx")
LATENT, ROPE = 128, 32
#: Heads, and keys of each request: one step of 32 and several, a tile of 256 and more, and one that is not whole.
CASES = [(128, (64,)), (40, (33, 100)), (16, (288,)), (16, (64,) * 4), (8, (64,)), (7, (96, 32)), (1, (320,))]


def up_to(n: int, step: int) -> int:
    return -(-n // step) * step


@cache
def executed(engine: str, heads: int, keys: tuple[int, ...]) -> simd.Executed:
    """A call over both caches, which lie in one memory, whose loads are counted."""
    case = Case(heads, (1,) * len(keys), keys, torch.bfloat16, size=64, latent=LATENT, rope=ROPE)
    memory = torch.cat([cache.flatten() for cache in case.caches])
    parts = memory.split([cache.numel() for cache in case.caches])
    case.caches = [part.view(cache.shape) for part, cache in zip(parts, case.caches, strict=True)]
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "engine", lambda: engine)
        patch.setattr(kernel, "library", simd.engines)
        patch.setattr(kernel, "function", kernel.function.__wrapped__)
        done = simd.executed(lambda: found.append(case.history()), memory)
    hold(found[0], case.exact())
    return done


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("heads", "keys"), CASES)
def test_no_more_is_multiplied_than_the_arithmetic_needs(engine: str, heads: int, keys: tuple[int, ...]) -> None:
    """Keys come in steps of 32 and rows in tiles of 16; without tiles 16 are lanes of scores, and up to 8 go alone."""
    done, steps = executed(engine, heads, keys).counts, sum(up_to(n, 32) for n in keys)
    if engine == "amx":
        assert not done["dots"]
        assert done["tile_dots"] == steps * (2 * LATENT + ROPE) * up_to(heads, 16) // (16 * 16 * 32)
    else:
        lanes = heads if heads <= 8 else up_to(heads, 16)
        assert not done["tile_dots"]
        assert done["dots"] == steps * ((LATENT + ROPE) * lanes + LATENT * heads) // 32


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("heads", "keys"), CASES)
def test_a_key_is_loaded_so_often(engine: str, heads: int, keys: tuple[int, ...]) -> None:
    """For scores once for each 32 rows, by tiles, or pair by pair and not 64 bytes at a time; once more for values.

    Up to 8 rows without tiles load it twice for each of 8, 4, 2 and 1 that they are.  What is not a request's is not
    loaded, but up to the next 32 keys.
    """
    done, steps, panels = executed(engine, heads, keys), sum(up_to(n, 32) for n in keys), up_to(heads, 32) // 32
    latent, rope = steps * LATENT // 32, steps * ROPE // 32  # in 64 bytes
    if engine == "amx":
        scores, values = panels, 1
    elif heads > 8:
        scores, values = 0, 1
        assert done.counts["broadcasts"] == 16 * (latent + rope) * panels + steps // 2 * heads * LATENT // 32
    else:
        scores = values = heads.bit_count()
    assert done.lines.max() == scores + values
    assert done.lines.sum() <= scores * (latent + rope) + values * latent


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("heads", "keys"), CASES)
def test_a_score_is_one_exponential_and_rounded_once(engine: str, heads: int, keys: tuple[int, ...]) -> None:
    """16 at a time, two such in a rounding; beside them a tile's change of the maximum, and the result's rounding."""
    done, few = executed(engine, heads, keys).counts, engine == "avx512_bf16" and heads <= 8
    groups, tile = (heads, 64) if few else (up_to(heads, 16) // 16, 256)
    scores = groups * sum(up_to(n, 64) // 16 if few else up_to(n, 32) for n in keys)
    assert scores / 2 < done["exponentials"] <= scores + groups * sum(up_to(n, tile) // tile for n in keys)
    assert scores / 2 <= done["conversions"] <= scores / 2 + heads * len(keys) * LATENT / 32
