"""How many tokens a step that fills in prompts has, and how many it has room for."""

from collections.abc import Sequence
from typing import Final

from mla_fx.config import MlaConfig
from mla_fx.decode import StepShape
from mla_fx.passes import expanding_saves

#: Tokens of a step that fills in prompts, unless expanding wants more: on one core with AVX2, 8 prompts of 64 took 1.07
#: to 1.2 times as long in steps of 64, and 0.97 to 1.05 times in one of 512.
CHUNK: Final = 256


def chunk_of(config: MlaConfig, shape: StepShape, *, expand: bool = True) -> int:
    """A power of two: 256 or as many as `shape` has requests, unless expanding wants more, of the room of its table.

    It does where one request of more tokens goes through `expand_current` (`expands`): as many as it needs for that.
    Where a table has room for two such steps and more, as many as the expansion of what lies before them, m L (P + V)
    multiply-adds of a head, wants to be half of what n tokens do with it, n m (P + R + V), at the most.
    """
    room = shape.table_width * shape.block_size * shape.layout.dcp
    least = max(CHUNK, round_up(shape.requests))
    counts = (1 << power for power in range(least.bit_length() - 1, room.bit_length()))
    found = next((count for count in counts if expand and expands(config, shape, [count])), None)
    if found is None:
        return least
    latent, expanded = config.kv_lora_rank, config.qk_nope_head_dim + config.v_head_dim
    while 4 * found <= room and found * (expanded + config.qk_rope_head_dim) < 2 * latent * expanded:
        found *= 2
    return found


def expands(config: MlaConfig, shape: StepShape, lengths: Sequence[int], behind: Sequence[int] | None = None) -> bool:
    """Whether `expand_current` saves multiply-adds of so many new tokens, and parameters are in the form for it.

    They are, on a context group of one, in any form: its own heads are all heads of the group.  `behind` is that of
    `expanding_saves`.
    """
    plain = not shape.project_before_merge
    if plain and shape.layout.dcp > 1:
        return False
    return expanding_saves(config, lengths, plain=plain, behind=behind) > 0


def taken(count: int) -> int:
    """Of so many tokens, how many a step that fills in prompts takes: not all where a quarter of it would be padding.

    >>> [taken(count) for count in (200, 256, 257, 384, 385, 512, 600, 1000)]
    [200, 256, 256, 256, 385, 512, 512, 1000]
    """
    half = round_up(count) // 2
    return half if half >= CHUNK and 2 * count <= 3 * half else count


def round_up(count: int) -> int:
    """The next power of two, for sizes that a program is compiled for.

    >>> [round_up(n) for n in (0, 1, 3, 64, 65)]
    [1, 1, 4, 64, 128]
    """
    return 1 << max(count - 1, 0).bit_length()
