"""A layer's new keys as one operator: norm of the latent, rotation, and both cache writes.

    latent, k_rope = rms_norm(kv, weight), rope(kv, cos, sin)
    latent_cache, rope_cache = write_rows(latent_cache, latent, slots), write_rows(rope_cache, k_rope, slots)

npu_kv_rmsnorm_rope_cache_v2 gives the new keys too (`is_output_kv`) and skips
slots of -1.  It takes angles in the dtype of the keys, 16 bits, so it is found
in steps whose angles are rounded (`RopeAngles.rounded`), at DeepSeek's sizes.
Source: kv_rms_norm_rope_cache of ops-transformer, its page, tiling and kernel.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import torch
from attrs import field, frozen

from mla_fx.backends.ascend.calls.attention import LATENT, ROPE
from mla_fx.backends.device import Run
from mla_fx.backends.table import Fusion
from mla_fx.effects import Aval, Equation, Found, Op, Step, Value, bind, ops, rewrite
from mla_fx.effects.validate import number


@frozen
class NormRopeWrite(Op):
    """`kv` [T, L + R], `weight` [L], `cos`, `sin` [T, R], caches [C, S, L] and [C, S, R], `slots` int64 [T].

    Gives `latent` [T, L], `k_rope` [T, R] and the next versions of both caches.  See `ops.RmsNorm`, `ops.Rope` and
    `ops.WriteRows`.
    """

    epsilon: float = field(validator=number(least=0))
    operands: ClassVar = {
        "kv": "T K",
        "weight": "L",
        "cos": "T R either",
        "sin": "T R either",
        "latent_cache": "C S L",
        "rope_cache": "C S R",
        "slots": "T int64",
    }
    results: ClassVar = ("latent", "k_rope", "latent_cache", "rope_cache")
    writes: ClassVar = {"latent_cache": "latent_cache", "rope_cache": "rope_cache"}

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """As of the parts."""
        rows, keys = (axes["T"],), (axes["C"], axes["S"])
        sizes = (axes["L"], axes["R"])
        return tuple(Aval((*where, size), dtype) for where in (rows, keys) for size in sizes)

    def value_rule(self, avals: Mapping[str, Aval], values: Mapping[str, Any]) -> None:
        """Slots as for one cache."""
        ops.WriteRows().value_rule({"cache": avals["latent_cache"]}, values)

    def definition(self, *operands: Value) -> tuple[Value, ...]:
        """Norm, rotation, one write after the other."""
        kv, weight, cos, sin, latent_cache, rope_cache, slots = operands
        (latent,) = bind(ops.RmsNorm(self.epsilon), kv, weight)
        (k_rope,) = bind(ops.Rope(None), kv, cos, sin)
        written = (
            bind(ops.WriteRows(), cache, rows, slots)[0]
            for cache, rows in ((latent_cache, latent), (rope_cache, k_rope))
        )
        return (latent, k_rope, *written)


def takes(op: NormRopeWrite, kv: Aval, weight: Aval, cos: Aval, sin: Aval, *caches: Aval) -> str | None:
    """What the operator takes."""
    for name, aval in (("kv", kv), ("cos", cos), ("sin", sin)):
        if aval.dtype != kv.dtype or aval.dtype not in ("bf16", "fp16"):
            return f"{name}: a norm with rotation and cache write needs bf16 or fp16, one of both: got {aval}"
    sizes = (weight.shape[0], cos.shape[1], kv.shape[1])
    if sizes != (LATENT, ROPE, LATENT + ROPE):
        return f"L, R and L + R: a norm with rotation and cache write needs {LATENT}, {ROPE} and their sum: got {sizes}"
    blocks, size, _ = caches[0].shape
    if not blocks or not size or size % 16:
        return f"block_size: a norm with rotation and cache write needs a multiple of 16: got {size} in {blocks} blocks"
    return None


def rule(
    kv: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    latent_cache: torch.Tensor,
    rope_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    run: Run,
    epsilon: float,
) -> tuple[torch.Tensor, ...]:
    """One call: the rope cache comes before the latent one, and so do the keys."""
    tokens, latent, rope = kv.shape[0], weight.shape[0], cos.shape[1]
    if not tokens:
        return kv.new_empty((0, latent)), kv.new_empty((0, rope)), latent_cache, rope_cache
    k_rope, c_kv = torch.ops.npu.npu_kv_rmsnorm_rope_cache_v2(
        kv.contiguous().view(tokens, 1, 1, latent + rope),
        weight.contiguous(),
        *(part.contiguous().view(tokens, 1, 1, rope) for part in (cos, sin)),
        slots.contiguous(),
        rope_cache.unsqueeze(2),
        latent_cache.unsqueeze(2),
        epsilon=epsilon,
        cache_mode="PA",
        is_output_kv=True,
    )
    return c_kv.view(tokens, latent), k_rope.view(tokens, rope), latent_cache, rope_cache


def find(step: Step) -> Step:
    """The step with every norm and rotation of the same rows, written with the same slots, as one operator."""
    avals = step.avals()
    maker = {name: equation for equation in step.equations for name in equation.results}
    writes: dict[tuple[str, str], Equation] = {}  # rows and slots -> the first write of them
    norms: dict[str, list[Equation]] = {}  # rows -> the norms of them
    for equation in step.equations:
        if isinstance(equation.op, ops.WriteRows):
            writes.setdefault((equation.operands[1], equation.operands[2]), equation)
        if isinstance(equation.op, ops.RmsNorm):
            norms.setdefault(equation.operands[0], []).append(equation)

    def match(step: Step, equation: Equation) -> Found | None:
        if not isinstance(equation.op, ops.WriteRows):
            return None
        _, rows, slots = equation.operands
        turn = maker.get(rows)
        if turn is None or not isinstance(turn.op, ops.Rope) or turn.op.heads is not None:
            return None
        kv, cos, sin = turn.operands
        for norm in norms.get(kv, ()):
            write = writes.get((norm.results[0], slots))
            if write is None:
                continue
            assert isinstance(norm.op, ops.RmsNorm)
            op = NormRopeWrite(norm.op.epsilon)
            operands = (kv, norm.operands[1], cos, sin, write.operands[0], equation.operands[0], slots)
            caches = [avals[name] for name in operands[4:6]]
            equal = caches[0].shape[:2] == caches[1].shape[:2] and operands[4] != operands[5]
            if equal and takes(op, *(avals[name] for name in operands)) is None:
                results = (*norm.results, *turn.results, *write.results, *equation.results)
                return Found((norm, turn, write, equation), Equation(op, operands, results, equation.tag))
        return None

    return rewrite(step, match)


FUSION: Final = Fusion(NormRopeWrite, rule, takes, find)
