"""Dtypes of activations on Ascend: bf16 and fp16 for the operators, float32 for plain torch beside them."""

from mla_fx.effects import Aval

#: What an activation may be.
TAKEN = ("bf16", "fp16", "fp32")


def wrong_dtype(name: str, aval: Aval) -> str | None:
    """Why nothing here takes an activation of this dtype; None where it is taken."""
    return None if aval.dtype in TAKEN else f"{name}: on ascend must be bf16, fp16 or fp32: got {aval.dtype}"
