"""Abstract values: the shape and dtype of a tensor that does not exist yet.

Nothing here knows a backend.  Dtypes are names; a backend maps them to its
own.  Shape rules are written with the letters of `AXES`, bound by `match`,
which is the one place where a shape error is worded.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from attrs import frozen

#: What each letter of a shape means, here and in every docstring.
AXES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "T": "tokens of the step, padding included",
        "B": "requests, padding included",
        "H": "query heads of the group",
        "N": "query heads of one rank, H / W",
        "W": "ranks of the group",
        "L": "kv_lora_rank, the latent",
        "R": "qk_rope_head_dim",
        "P": "qk_nope_head_dim",
        "Q": "qk_nope_head_dim + qk_rope_head_dim",
        "V": "v_head_dim",
        "E": "payload features, L and the lanes of the LSE",
        "K": "kv_lora_rank + qk_rope_head_dim",
        "C": "cache blocks",
        "S": "tokens in a cache block",
        "M": "columns of the block table",
        "D": "input features",
        "F": "output features",
        "O": "rows that are asked for",
        "A": "rows of the vocabulary on one rank",
        "X": "routed experts of the model",
        "Y": "routed experts on one rank",
        "U": "experts that a token goes to, num_experts_per_tok",
        "Z": "rows of the experts, T * U",
    }
)

FLOATS: Final = ("bf16", "fp16", "fp32", "fp64")
#: "host" is a tuple of Python integers on the host: lengths, which operators take at launch.
DTYPES: Final = (*FLOATS, "int8", "int32", "int64", "host")
_SIZES: Final = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "int8": 1, "int32": 4, "int64": 8, "host": 0}


class ShapeError(ValueError):
    """Operands that an op cannot take: names the op, the operand, the axis, and both sizes or dtypes."""


@frozen
class Aval:
    """Shape and dtype of a value; prints like `bf16[4, 16, 512]`."""

    shape: tuple[int, ...]
    dtype: str

    def __attrs_post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ShapeError(f"dtype must be one of {', '.join(DTYPES)}: got {self.dtype!r}")
        for size in self.shape:
            if not isinstance(size, int) or size < 0:
                raise ShapeError(f"every axis must be an integer of at least 0: got shape {self.shape}")

    @property
    def bytes_(self) -> int:
        """Bytes of device memory the value takes (0 for host integers)."""
        total = _SIZES[self.dtype]
        for size in self.shape:
            total *= size
        return total

    def with_float(self, dtype: str) -> "Aval":
        """The same value with its floating dtype replaced; integers stay."""
        return Aval(self.shape, dtype) if self.dtype in FLOATS else self

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


def wide_dtype(dtype: str) -> str:
    """Dtype of what stays wide beside activations of `dtype`, as LSEs and gates do: float32, except beside float64.

    >>> wide_dtype("bf16"), wide_dtype("fp64")
    ('fp32', 'fp64')
    """
    return "fp64" if dtype == "fp64" else "fp32"


def lse_lanes(dtype: str) -> int:
    """Lanes of `dtype` that the bits of one LSE take in an exchange payload.

    >>> [lse_lanes(dtype) for dtype in ("bf16", "fp16", "fp32", "fp64")]
    [2, 2, 1, 1]
    """
    return _SIZES[wide_dtype(dtype)] // _SIZES[dtype]


def match(op: str, /, **operands: tuple[Aval, str]) -> dict[str, int]:
    """Bind the letters of each operand's axes to sizes, and return letter -> size.

    `operands` maps a name to `(aval, "T N L")`.  Raises `ShapeError` when a
    rank differs or a letter would get two sizes.

    >>> match("combine", local=(Aval((4, 16, 512), "bf16"), "T N L"))
    {'T': 4, 'N': 16, 'L': 512}
    """
    sizes: dict[str, int] = {}
    seen: dict[str, str] = {}
    for name, (aval, letters) in operands.items():
        axes = letters.split()
        if len(axes) != len(aval.shape):
            raise ShapeError(
                f"{op}: {name} must be [{', '.join(axes)}], {len(axes)} axes: got {aval}, {len(aval.shape)} axes"
            )
        for letter, size in zip(axes, aval.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                meaning = AXES.get(letter, letter)
                raise ShapeError(
                    f"{op}: axis {letter} ({meaning}) must be the same everywhere: "
                    f"{sizes[letter]} in {seen[letter]}, {size} in {name}"
                )
            seen.setdefault(letter, name)
    return sizes


def same_dtype(op: str, /, **operands: Aval) -> str:
    """The one floating dtype of all operands; raises `ShapeError` naming the two that differ."""
    (first, aval), *rest = operands.items()
    if aval.dtype not in FLOATS:
        raise ShapeError(f"{op}: {first} must be floating ({', '.join(FLOATS)}): got {aval.dtype}")
    for name, other in rest:
        if other.dtype != aval.dtype:
            raise ShapeError(f"{op}: {name} must have the dtype of {first}, {aval.dtype}: got {other.dtype}")
    return aval.dtype


def require_dtype(op: str, name: str, aval: Aval, *allowed: str) -> None:
    """Raise `ShapeError` unless the operand has one of the dtypes `allowed`."""
    if aval.dtype not in allowed:
        raise ShapeError(f"{op}: {name} must be {' or '.join(allowed)}: got {aval.dtype}")
