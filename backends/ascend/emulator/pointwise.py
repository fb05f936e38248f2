"""Emulated operators that look at one place at a time: arithmetic, comparisons, fills, random numbers, copies."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch.nn import functional

from mla_fx.backends.ascend.emulator.operator import Operator, any_strides

_Function = Callable[..., torch.Tensor]


def _sigmoid(a: torch.Tensor) -> torch.Tensor:
    """Not torch.sigmoid, whose last bits depend on where in a row a number lies."""
    return 1 / (1 + torch.exp(-a))


_UNARY: Final[Mapping[str, _Function]] = {
    "Abs": torch.abs,
    "BitwiseNot": torch.bitwise_not,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Expm1": torch.expm1,
    "Floor": torch.floor,
    "IsFinite": torch.isfinite,
    "IsNegInf": torch.isneginf,
    "IsPosInf": torch.isposinf,
    "Log": torch.log,
    "Log10": torch.log10,
    "Log1p": torch.log1p,
    "Log2": torch.log2,
    "LogicalNot": torch.logical_not,
    "Neg": torch.neg,
    "Reciprocal": torch.reciprocal,
    "Relu": torch.relu,
    "Round": torch.round,
    "Rsqrt": torch.rsqrt,
    "Sigmoid": _sigmoid,
    "Sign": torch.sign,
    "Silu": functional.silu,
    "Sin": torch.sin,
    "Sqrt": torch.sqrt,
    "Tanh": torch.tanh,
    "Trunc": torch.trunc,
}
_COMPARISONS: Final[Mapping[str, _Function]] = {
    "Eq": torch.eq,
    "Ge": torch.ge,
    "Gt": torch.gt,
    "Le": torch.le,
    "Lt": torch.lt,
    "Ne": torch.ne,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
    "Fmod": torch.fmod,
}
_BINARY: Final[Mapping[str, _Function]] = {
    "LogicalAnd": torch.logical_and,
    "LogicalOr": torch.logical_or,
    "LogicalXor": torch.logical_xor,
    "Maximum": torch.maximum,
    "Minimum": torch.minimum,
    "PowTensorTensor": torch.pow,
    "RemainderTensorTensor": torch.remainder,
}


def _forms(name: str, inplace: str, signature: str, function: _Function) -> dict[str, Operator]:
    """To a result, and in place."""
    return {
        f"aclnn{name}": Operator(f"{signature} O", lambda *given: given[-1].copy_(function(*given[:-1]))),
        f"aclnn{inplace}": Operator(signature, lambda *given: given[0].copy_(function(*given))),
    }


def _family(name: str, function: _Function) -> dict[str, Operator]:
    """The four forms of a binary operator.  The wheel takes one only where all are there."""
    return {
        **_forms(name, f"Inplace{name}", "T T", function),
        **_forms(f"{name}s", f"Inplace{name}s", "T S", function),
    }


def _scaled_family(name: str, sign: int) -> dict[str, Operator]:
    """Addition and subtraction have a factor on the second operand."""

    def function(a: Any, b: Any, alpha: Any) -> torch.Tensor:
        found: torch.Tensor = a + sign * alpha * b
        return found

    return {
        **_forms(name, f"Inplace{name}", "T T S", function),
        **_forms(f"{name}s", f"Inplace{name}s", "T S S", function),
    }


def _compared(name: str, function: _Function) -> dict[str, Operator]:
    return {
        **_forms(f"{name}Tensor", f"Inplace{name}Tensor", "T T", function),
        **_forms(f"{name}Scalar", f"Inplace{name}Scalar", "T S", function),
    }


def _rounded(a: Any, b: Any, mode: int) -> torch.Tensor:
    """Mode 0 is a true quotient, 1 rounds towards zero, 2 downwards."""
    return torch.div(a, b, rounding_mode=(None, "trunc", "floor")[mode])


def _drawn(seed: int, offset: int) -> torch.Generator:
    """The emulator's own numbers, not those of an NPU; the same for the same seed and offset."""
    return torch.Generator().manual_seed((seed * 1_000_003 + offset) % 2**63)


def _integers(out: torch.Tensor, low: int, high: int, seed: int, offset: int) -> None:
    out.copy_(torch.randint(low, high, out.shape, generator=_drawn(seed, offset)))


def _any_integers(out: torch.Tensor, seed: int, offset: int) -> None:
    """From 0 to the largest that the dtype has, or has without a gap."""
    gapless = {torch.float16: 2**11, torch.bfloat16: 2**8, torch.float32: 2**24, torch.float64: 2**53, torch.bool: 1}
    most = gapless[out.dtype] if out.dtype in gapless else torch.iinfo(out.dtype).max
    _integers(out, 0, min(most + 1, 2**63 - 1), seed, offset)


def _normal(mean: Any, deviation: Any, seed: int, offset: int, out: torch.Tensor) -> None:
    noise = torch.randn(out.shape, generator=_drawn(seed, offset))
    out.copy_(noise * deviation + mean)


_RANDOM: Final[Mapping[str, Operator]] = {
    "aclnnInplaceUniform": Operator(
        "O d d i64 i64",
        lambda out, low, high, seed, offset: out.copy_(
            torch.rand(out.shape, generator=_drawn(seed, offset)) * (high - low) + low
        ),
    ),
    "aclnnInplaceNormal": Operator("O f f i64 i64", lambda out, m, d, seed, offset: _normal(m, d, seed, offset, out)),
    "aclnnNormalFloatFloat": Operator("f f i64 i64 O", _normal),
    "aclnnNormalFloatTensor": Operator("f T i64 i64 O", _normal),
    "aclnnNormalTensorFloat": Operator("T f i64 i64 O", _normal),
    "aclnnNormalTensorTensor": Operator("T T i64 i64 O", _normal),
    "aclnnInplaceRandom": Operator("O i64 i64 i64 i64", _integers),
    "aclnnInplaceRandomWithoutFromTo": Operator("O i64 i64", _any_integers),
    "aclnnInplaceBernoulli": Operator(
        "O S i64 i64",
        lambda out, p, seed, offset: out.copy_(torch.rand(out.shape, generator=_drawn(seed, offset)) < p),
    ),
    "aclnnInplaceBernoulliTensor": Operator(
        "O T i64 i64",
        lambda out, p, seed, offset: out.copy_(torch.rand(out.shape, generator=_drawn(seed, offset)) < p),
    ),
    "aclnnRandperm": Operator(
        "i64 i64 i64 O",
        lambda count, seed, offset, out: out.copy_(torch.randperm(count, generator=_drawn(seed, offset))),
    ),
}

#: Name to operator.
OPERATORS: Final[Mapping[str, Operator]] = MappingProxyType(
    {
        **{k: v for name, of in _UNARY.items() for k, v in _forms(name, f"Inplace{name}", "T", of).items()},
        **{k: v for name, of in _BINARY.items() for k, v in _forms(name, f"Inplace{name}", "T T", of).items()},
        **{k: v for name, of in _COMPARISONS.items() for k, v in _compared(name, of).items()},
        **_scaled_family("Add", 1),
        **_scaled_family("Sub", -1),
        "aclnnRsub": Operator("T T S O", lambda a, b, alpha, out: out.copy_(b - alpha * a)),
        "aclnnRsubs": Operator("T S S O", lambda a, b, alpha, out: out.copy_(b - alpha * a)),
        **_family("Mul", torch.mul),
        **_family("Div", torch.div),
        **_family("FloorDivide", torch.floor_divide),
        **_forms("DivMod", "InplaceDivMod", "T T i32", _rounded),
        **_forms("DivMods", "InplaceDivMods", "T S i32", _rounded),
        **_forms("PowTensorScalar", "InplacePowTensorScalar", "T S", torch.pow),
        "aclnnPowScalarTensor": Operator("S T O", lambda a, b, out: out.copy_(torch.pow(a, b))),
        **_forms("RemainderTensorScalar", "InplaceRemainderTensorScalar", "T S", torch.remainder),
        "aclnnRemainderScalarTensor": Operator("S T O", lambda a, b, out: out.copy_(torch.remainder(a, b))),
        **_forms("Addcmul", "InplaceAddcmul", "T T T S", lambda a, b, c, value: a + value * b * c),
        **_forms("Addcdiv", "InplaceAddcdiv", "T T T S", lambda a, b, c, value: a + value * b / c),
        **_forms("Lerp", "InplaceLerp", "T T T", torch.lerp),
        **_forms("Lerps", "InplaceLerps", "T T S", torch.lerp),
        **_forms("NanToNum", "InplaceNanToNum", "T f f f", torch.nan_to_num),
        "aclnnGelu": Operator("T O", lambda a, out: out.copy_(functional.gelu(a))),
        "aclnnGeluV2": Operator(
            "T i64 O", lambda a, mode, out: out.copy_(functional.gelu(a, approximate="tanh" if mode else "none"))
        ),
        "aclnnIsClose": Operator(
            "T T d d b O", lambda a, b, rtol, atol, nan, out: out.copy_(torch.isclose(a, b, rtol, atol, nan))
        ),
        "aclnnEqual": Operator("T T O", lambda a, b, out: out.fill_(torch.equal(a, b))),
        **_forms("Clamp", "InplaceClamp", "T S S", torch.clamp),
        **_forms("ClampTensor", "InplaceClampTensor", "T T T", torch.clamp),
        **_forms("ClampMin", "InplaceClampMin", "T S", torch.clamp_min),
        **_forms("ClampMax", "InplaceClampMax", "T S", torch.clamp_max),
        **_forms("ClampMinTensor", "InplaceClampMinTensor", "T T", torch.clamp_min),
        **_forms("ClampMaxTensor", "InplaceClampMaxTensor", "T T", torch.clamp_max),
        "aclnnSWhere": Operator("T T T O", lambda mask, a, b, out: out.copy_(torch.where(mask, a, b))),
        "aclnnCast": Operator("T i32 O", lambda a, dtype, out: out.copy_(a)),
        "aclnnInplaceCopy": Operator("O T", lambda out, a: out.copy_(a), lies=any_strides),
        "aclnnInplaceMaskedFillScalar": Operator("T T S", lambda a, mask, value: a.masked_fill_(mask, value)),
        "aclnnInplaceMaskedFillTensor": Operator("T T T", lambda a, mask, value: a.masked_fill_(mask, value)),
        "aclnnInplaceFillScalar": Operator("O S", lambda out, value: out.fill_(value)),
        "aclnnInplaceFillTensor": Operator("O T", lambda out, value: out.copy_(value)),
        "aclnnInplaceZero": Operator("O", lambda out: out.zero_()),
        "aclnnInplaceOne": Operator("O", lambda out: out.fill_(1)),
        **_RANDOM,
    }
)
