"""Abstract values: the shape and dtype of a tensor that does not exist yet.

Nothing here knows a backend.  Dtypes are names; a backend maps them to its
own.  An op says of each operand its axes, in the letters of `AXES`, and its
kind; `match` binds the letters, and is the one place where a shape error is
worded.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Final

from attrs import frozen

#: What each letter of a shape means, here and in every docstring.
AXES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "T": "tokens of the step, padding included",
        "J": "tokens of another part of the step, or of all of it",
        "B": "requests, padding included",
        "H": "query heads of the group",
        "N": "query heads of one rank, H / W",
        "W": "ranks of the group",
        "L": "kv_lora_rank, the latent",
        "R": "qk_rope_head_dim",
        "P": "qk_nope_head_dim",
        "Q": "qk_nope_head_dim + qk_rope_head_dim",
        "V": "v_head_dim",
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
DTYPES: Final = (*FLOATS, "int8", "int32", "int64")
_SIZES: Final = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "int8": 1, "int32": 4, "int64": 8}


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
        if not isinstance(self.shape, tuple):
            raise ShapeError(f"shape must be a tuple of integers: got {self.shape!r}")
        for size in self.shape:
            if type(size) is not int or size < 0:
                raise ShapeError(f"every axis must be an integer of at least 0: got shape {self.shape}")

    @property
    def bytes_(self) -> int:
        """Bytes of memory the value takes."""
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


@frozen
class Operand:
    """What an op says of an operand: its axes, and its kind.

    The kind is "float" for the one floating dtype of the op, "wide" for what stays wide beside it (`wide_dtype`),
    "either" for one of these two, a dtype of integers, "host" for a tuple of Python integers, which operators take at
    launch, or "any" for a tensor of whatever shape and dtype.
    """

    axes: tuple[str, ...]
    kind: str = "float"

    @property
    def on_host(self) -> bool:
        """Whether the operand stays on the host."""
        return self.kind == "host"


@cache
def operand(text: str) -> Operand:
    """Read an operand's axes and kind.

    >>> operand("T L"), operand("B host")
    (Operand(axes=('T', 'L'), kind='float'), Operand(axes=('B',), kind='host'))
    """
    *axes, last = text.split()
    if last in ("wide", "either", "host", "any", *DTYPES):
        return Operand(tuple(axes), last)
    return Operand((*axes, last))


def match(op: str, operands: Mapping[str, str], avals: Sequence[Aval]) -> tuple[dict[str, int], str]:
    """Bind the letters of all operands' axes to sizes, and find the op's floating dtype ("" where it has none).

    Raises `ShapeError` when the number of operands or a rank differs, a letter would get two sizes, or a dtype is
    not that of its kind.

    >>> match("sum", {"out": "T N L", "lse": "T N wide"}, (Aval((4, 16, 512), "bf16"), Aval((4, 16), "fp32")))
    ({'T': 4, 'N': 16, 'L': 512}, 'bf16')
    """
    if len(avals) != len(operands):
        raise ShapeError(f"{op} takes {len(operands)} operands ({', '.join(operands)}): got {len(avals)}")
    named = [(name, operand(text), aval) for (name, text), aval in zip(operands.items(), avals, strict=True)]
    sizes: dict[str, int] = {}
    seen: dict[str, str] = {}
    for name, wanted, aval in named:
        if wanted.kind == "any":
            continue
        if len(wanted.axes) != len(aval.shape):
            raise ShapeError(
                f"{op}: {name} must be [{', '.join(wanted.axes)}], {len(wanted.axes)} axes: got {aval}, "
                f"{len(aval.shape)} axes"
            )
        for letter, size in zip(wanted.axes, aval.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ShapeError(
                    f"{op}: axis {letter} ({AXES.get(letter, letter)}) must be the same everywhere: "
                    f"{sizes[letter]} in {seen[letter]}, {size} in {name}"
                )
            seen.setdefault(letter, name)
    return sizes, _dtype(op, named)


def _dtype(op: str, named: list[tuple[str, Operand, Aval]]) -> str:
    """The one dtype of the floating operands; where an op has only wide ones, theirs."""
    first, dtype = "", ""
    for kind, allowed in (("float", FLOATS), ("wide", ("fp32", "fp64"))):
        for name, wanted, aval in named:
            if wanted.kind == kind and not dtype:
                if aval.dtype not in allowed:
                    raise ShapeError(f"{op}: {name} must be floating ({', '.join(allowed)}): got {aval.dtype}")
                first, dtype = name, aval.dtype
    for name, wanted, aval in named:
        if wanted.kind == "either" and aval.dtype in (dtype, wide_dtype(dtype)):
            continue
        kind = {"float": dtype, "wide": dtype and wide_dtype(dtype), "host": "int64"}.get(wanted.kind, wanted.kind)
        if kind not in (aval.dtype, "any"):
            rule = {
                "float": f"have the dtype of {first}, {kind}",
                "wide": f"be {kind}, to go with {first}, {dtype}",
                "either": f"be {dtype} or {wide_dtype(dtype)}, to go with {first}, {dtype}",
            }
            raise ShapeError(f"{op}: {name} must {rule.get(wanted.kind, f'be {kind}')}: got {aval.dtype}")
    return dtype
