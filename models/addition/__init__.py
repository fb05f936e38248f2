"""A trained model of DeepSeek-V3's architecture, small enough to lie in the repository: it adds two numbers.

The checkpoint and its tokenizer lie beside this file; `train.py` made them.
Training never sees a held-out problem, whatever its seed.
"""

import random
from pathlib import Path
from typing import Final

from mla_fx.effects import InputError

if __name__ != "mla_fx.models.addition":  # reached as a top-level name from the checkout
    raise ImportError(f"import this package as 'mla_fx.models.addition', not {__name__!r}")

#: The checkpoint: `config.json`, `model.safetensors` and `tokenizer.json`.
DIRECTORY: Final = Path(__file__).parent

#: Most problems that `problems` gives.
LIMIT: Final = 5000


def held_out(a: int, b: int) -> bool:
    """Whether `a + b` is kept from training: one problem in 50, by a multiplicative hash.

    The upper half of the 32 bits decides; the lowest bits of such a product depend on those of `b` alone.
    """
    return (((a * 1000 + b) * 2654435761) % 2**32 >> 16) % 50 == 0


def problems(count: int, *, seed: int = 0) -> list[tuple[str, str]]:
    """Distinct held-out problems, as pairs of prompt and answer.

    Each number has one to three digits, each count as likely as far as there are distinct problems.  Of one seed,
    fewer problems are the first of more.

    >>> problems(2)
    [('242 + 27 =', '269'), ('3 + 365 =', '368')]
    """
    if not 0 <= count <= LIMIT:
        raise InputError(f"count: must be from 0 to {LIMIT}: got {count}")
    generator = random.Random(seed)
    found: dict[tuple[int, int], None] = {}
    while len(found) < count:
        a, b = number(generator), number(generator)
        if held_out(a, b):
            found[a, b] = None
    return [(f"{a} + {b} =", str(a + b)) for a, b in found]


def number(generator: random.Random, digits: int | None = None) -> int:
    """A number without leading zeros, of the given count of digits or else of one to three, each as likely."""
    digits = digits or generator.randint(1, 3)
    return generator.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
