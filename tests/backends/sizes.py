"""Operands of every op at the sizes of DeepSeek-V3, as avals: what a rule is asked on tensors without data."""

from collections.abc import Callable
from typing import Any, Final

import attrs
import torch

from mla_fx.backends.ascend.fused.add_rms_norm import AddRmsNorm
from mla_fx.backends.ascend.fused.norm_rope_write import NormRopeWrite
from mla_fx.backends.ascend.fused.quant_experts import QuantExperts
from mla_fx.backends.ascend.fused.quant_mlp import QuantMlp
from mla_fx.backends.ascend.fused.rope_pair import RopePair
from mla_fx.dtypes import DTYPES
from mla_fx.effects import Aval, Group, Op, ops
from mla_fx.effects.aval import operand, wide_dtype

HEADS, LATENT, ROPE, NOPE, VALUE = 128, 512, 64, 128, 128
HIDDEN, QUERY, DENSE, EXPERT, SHARED = 7168, 1536, 18432, 2048, 2048
EXPERTS, TOP_K, VOCABULARY = 256, 8, 129280
BLOCKS, BLOCK, COLUMNS = 64, 128, 16

RANKS: Final = (1, 2, 4, 8)
TOKENS: Final = (1, 2, 17, 64)


@attrs.frozen
class Case:
    """An op with its operands; lengths are values, since they are on the host."""

    op: Op
    avals: tuple[Aval, ...]
    lengths: dict[str, tuple[int, ...]] = attrs.field(factory=dict)

    def operands(self, device: str = "meta") -> tuple[Any, ...]:
        """Tensors without data, and lengths."""
        return tuple(
            self.lengths[name]
            if name in self.lengths
            else torch.empty(aval.shape, dtype=DTYPES[aval.dtype], device=device)
            for name, aval in zip(self.op.operands, self.avals, strict=True)
        )


@attrs.frozen
class Step:
    """The sizes of one step: ranks, tokens, and the dtype of activations."""

    ranks: int
    tokens: int
    dtype: str = "bf16"

    @property
    def heads(self) -> int:
        return HEADS // self.ranks

    @property
    def group(self) -> Group:
        return Group("tp", self.ranks)

    def real(self, *shape: int) -> Aval:
        return Aval(shape, self.dtype)

    def wide(self, *shape: int) -> Aval:
        return Aval(shape, wide_dtype(self.dtype))

    def requests(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Query and history lengths of four requests: two tokens, none, one, the others but one; padding behind."""
        tokens = self.tokens
        query = (min(2, tokens), 0, min(1, max(tokens - 2, 0)), max(tokens - 4, 0))
        return query, (1000, 77, 0, COLUMNS * BLOCK)


def _linear(s: Step) -> list[Case]:
    weights = [
        (QUERY + LATENT + ROPE, HIDDEN),
        (s.heads * (NOPE + ROPE), QUERY),
        (HEADS * (NOPE + ROPE), QUERY),
        (HIDDEN, s.heads * VALUE),
        (2 * DENSE // s.ranks, HIDDEN),
        (HIDDEN, DENSE // s.ranks),
        (2 * SHARED // s.ranks, HIDDEN),
        (HIDDEN, SHARED // s.ranks),
        (-(-VOCABULARY // s.ranks), HIDDEN),
        (HIDDEN, 2 * HIDDEN),
    ]
    return [Case(ops.Linear(), (s.real(s.tokens, inner), s.real(out, inner))) for out, inner in weights]


def _quant_linear(s: Step) -> list[Case]:
    """All but the head, which stays in the dtype."""
    cases = []
    for case in _linear(s):
        x, (out, inner) = case.avals[0], case.avals[1].shape
        if out != -(-VOCABULARY // s.ranks):
            cases.append(Case(ops.QuantLinear(), (x, Aval((out, inner), "int8"), s.wide(out))))
    return cases


def _rms_norm(s: Step) -> list[Case]:
    widths = [(HIDDEN, HIDDEN), (QUERY, QUERY), (LATENT + ROPE, LATENT)]
    return [Case(ops.RmsNorm(1e-6), (s.real(s.tokens, inner), s.real(kept))) for inner, kept in widths]


def _rope_angles(s: Step) -> list[Case]:
    frequencies = tuple(10000.0 ** (-2 * i / ROPE) for i in range(ROPE // 2))
    each = [ops.RopeAngles(frequencies=frequencies, magnitude=1.0, rounded=rounded) for rounded in (False, True)]
    return [Case(op, (Aval((s.tokens,), "int64"), s.real(s.tokens, HIDDEN))) for op in each]


def _rope(s: Step) -> list[Case]:
    angles = [(kind(s.tokens, ROPE),) * 2 for kind in (s.wide, s.real)]
    return [
        Case(ops.Rope(heads), (s.real(s.tokens, features), *pair))
        for pair in angles
        for heads, features in ((s.heads, s.heads * (NOPE + ROPE)), (None, LATENT + ROPE))
    ]


def _caches(s: Step) -> tuple[Aval, Aval]:
    return s.real(BLOCKS, BLOCK, LATENT), s.real(BLOCKS, BLOCK, ROPE)


def _write_rows(s: Step) -> list[Case]:
    slots = Aval((s.tokens,), "int64")
    return [Case(ops.WriteRows(), (cache, s.real(s.tokens, cache.shape[2]), slots)) for cache in _caches(s)]


def _history(s: Step) -> list[Case]:
    query, history = s.requests()
    queries = (s.real(s.tokens, HEADS, LATENT), s.real(s.tokens, HEADS, ROPE))
    table, lengths = Aval((len(query), COLUMNS), "int32"), Aval((len(query),), "int64")
    return [
        Case(
            ops.HistoryAttention(0.07),
            (*queries, *_caches(s), table, lengths, lengths),
            {"query_lengths": query, "history_lengths": seen},
        )
        for seen in (history, (0,) * len(history))
    ]


def _current(s: Step) -> list[Case]:
    queries = (s.real(s.tokens, s.heads, LATENT), s.real(s.tokens, s.heads, ROPE))
    keys = (s.real(s.tokens, LATENT), s.real(s.tokens, ROPE))
    return [
        Case(ops.CurrentAttention(0.07), (*queries, *keys, Aval((len(query),), "int64")), {"query_lengths": query})
        for query in (s.requests()[0], (1,) * s.tokens)
    ]


def _expanded(s: Step) -> list[Case]:
    """Own heads of weights that are of own heads, and of those that are of all."""
    keys = (s.real(s.tokens, LATENT), s.real(s.tokens, ROPE))
    query = s.requests()[0]
    return [
        Case(
            ops.ExpandedAttention(0.07, s.group),
            (
                s.real(s.tokens, asked * (NOPE + ROPE)),
                s.real(s.tokens, s.heads, ROPE),
                *keys,
                s.real(asked, NOPE, LATENT),
                s.real(valued, LATENT, value),
                Aval((len(query),), "int64"),
            ),
            {"query_lengths": query},
        )
        for asked, valued, value in ((s.heads, s.heads, VALUE), (HEADS, HEADS, VALUE), (s.heads, HEADS, 2 * VALUE))
    ]


def _all_to_all(s: Step) -> list[Case]:
    return [Case(ops.AllToAll(s.group), (s.real(s.tokens, HEADS, LATENT), s.wide(s.tokens, HEADS)))]


def _gather_heads(s: Step) -> list[Case]:
    parts = (s.real(s.tokens, s.heads, LATENT), s.real(s.tokens, s.heads, ROPE))
    return [Case(ops.GatherHeads(s.group), parts)]


def _gating(s: Step) -> list[Case]:
    third = ops.GatingTopK(top_k=TOP_K, groups=8, top_groups=4, scale=2.5)
    second = ops.GatingTopK(
        top_k=TOP_K, groups=8, top_groups=4, scoring="softmax", group_score="max", normalise=False, scale=16.0
    )
    return [Case(op, (s.wide(s.tokens, EXPERTS), s.wide(EXPERTS))) for op in (third, second)]


def _grouped(s: Step) -> list[tuple[Aval, tuple[int, int, int], Aval]]:
    own, rows = EXPERTS // s.ranks, s.tokens * TOP_K
    weights = ((own, 2 * EXPERT, HIDDEN), (own, HIDDEN, EXPERT))
    return [(s.real(rows, weight[2]), weight, Aval((own,), "int64")) for weight in weights]


def _grouped_linear(s: Step) -> list[Case]:
    return [Case(ops.GroupedLinear(), (rows, s.real(*weight), counts)) for rows, weight, counts in _grouped(s)]


def _quant_grouped(s: Step) -> list[Case]:
    return [
        Case(ops.QuantGroupedLinear(), (rows, Aval(weight, "int8"), s.wide(*weight[:2]), counts))
        for rows, weight, counts in _grouped(s)
    ]


def _quant_experts(s: Step) -> list[Case]:
    own = EXPERTS // s.ranks
    weights = [(own, 2 * EXPERT, HIDDEN), (own, HIDDEN, EXPERT)]
    given = [each for shape in weights for each in (Aval(shape, "int8"), s.wide(*shape[:2]))]
    op = QuantExperts(own, s.group)
    return [Case(op, (s.real(s.tokens, HIDDEN), Aval((s.tokens, TOP_K), "int32"), *given))]


def _quant_mlp(s: Step) -> list[Case]:
    widths = (DENSE // s.ranks, SHARED // s.ranks)
    return [
        Case(
            QuantMlp(),
            (
                s.real(s.tokens, HIDDEN),
                Aval((2 * width, HIDDEN), "int8"),
                s.wide(2 * width),
                Aval((HIDDEN, width), "int8"),
                s.wide(HIDDEN),
            ),
        )
        for width in widths
    ]


def _permute(s: Step) -> list[Case]:
    op = ops.PermuteTokens(EXPERTS // s.ranks, s.group)
    return [Case(op, (s.real(s.tokens, HIDDEN), Aval((s.tokens, TOP_K), "int32")))]


def _tokens_over_replicas(s: Step) -> tuple[tuple[Any, ...], Aval, Aval]:
    """Every rank a replica of its own: parameters, the experts that were chosen, counts."""
    given = (EXPERTS // s.ranks, Group("ep", s.ranks), Group("tp", 1))
    return given, Aval((s.tokens, TOP_K), "int32"), Aval((s.ranks,), "int64")


def _dispatch(s: Step) -> list[Case]:
    given, experts, _ = _tokens_over_replicas(s)
    return [Case(ops.DispatchTokens(*given), (s.real(s.tokens, HIDDEN), s.wide(s.tokens, TOP_K), experts))]


def _combine_tokens(s: Step) -> list[Case]:
    given, experts, counts = _tokens_over_replicas(s)
    return [Case(ops.CombineTokens(*given), (s.real(s.ranks * s.tokens, HIDDEN), experts, counts))]


def _embedding(s: Step) -> list[Case]:
    table = s.real(-(-VOCABULARY // s.ranks), HIDDEN)
    return [Case(ops.Embedding(VOCABULARY, s.group), (Aval((s.tokens,), "int64"), table))]


def _combine(s: Step) -> list[Case]:
    """Latents, and values that were projected before."""
    return [
        Case(
            ops.Combine(flat),
            (
                s.real(s.ranks, s.tokens, s.heads, features),
                s.wide(s.ranks, s.tokens, s.heads),
                s.real(s.tokens, s.heads, features),
                s.wide(s.tokens, s.heads),
            ),
        )
        for flat, features in ((False, LATENT), (True, VALUE))
    ]


def _v_up(s: Step) -> list[Case]:
    """What was merged; all heads of the history, and the current part with own heads of them, before."""
    every = s.real(HEADS, LATENT, VALUE)
    own = s.real(s.tokens, s.heads, LATENT)
    return [
        Case(ops.VUp(), (own, s.real(s.heads, LATENT, VALUE))),
        Case(ops.VUp(flat=False), (s.real(s.tokens, HEADS, LATENT), every)),
        Case(ops.VUp(s.group, flat=False), (own, every)),
    ]


def _norm_rope_write(s: Step) -> list[Case]:
    if s.dtype not in ("bf16", "fp16"):  # found in no other step
        return []
    angles, (latent, rope), slots = (s.real(s.tokens, ROPE),) * 2, _caches(s), Aval((s.tokens,), "int64")
    return [Case(NormRopeWrite(1e-6), (s.real(s.tokens, LATENT + ROPE), s.real(LATENT), *angles, latent, rope, slots))]


def _rope_pair(s: Step) -> list[Case]:
    if s.dtype == "fp64":  # whose angles are wider than the operator's
        return []
    rows = (s.real(s.tokens, s.heads * (NOPE + ROPE)), s.real(s.tokens, LATENT + ROPE))
    return [Case(RopePair(s.heads), (*rows, *(s.wide(s.tokens, ROPE),) * 2))]


def _single(make: Callable[[Step], Case]) -> Callable[[Step], list[Case]]:
    return lambda step: [make(step)]


def _by_letters(op: type[Op], s: Step) -> list[Case]:
    """The case of an op without parameters, from what it says of its operands, letter by letter."""
    sizes = {"T": s.tokens, "N": s.heads, "H": HEADS, "W": s.ranks, "L": LATENT, "R": ROPE, "V": VALUE, "D": HIDDEN}
    sizes |= {"X": EXPERTS, "U": TOP_K, "Z": s.tokens * TOP_K, "C": BLOCKS, "S": BLOCK, "O": 4, "J": 3}
    sizes |= {"F": QUERY, "K": LATENT + ROPE}
    dtypes = {"float": s.dtype, "wide": wide_dtype(s.dtype), "any": s.dtype}
    said = map(operand, op.operands.values())
    avals = (Aval(tuple(sizes[axis] for axis in one.axes), dtypes.get(one.kind, one.kind)) for one in said)
    return [Case(op(), tuple(avals))]


#: Op to its cases in a step, where one by the letters of its operands would not do.
SIZES: Final[dict[type[Op], Callable[[Step], list[Case]]]] = {
    ops.Linear: _linear,
    ops.RmsNorm: _rms_norm,
    ops.AbsorbQuery: _single(
        lambda s: Case(
            ops.AbsorbQuery(rope=ROPE),
            (s.real(s.tokens, s.heads * (NOPE + ROPE)), s.real(s.heads, NOPE, LATENT)),
        )
    ),
    ops.RopeAngles: _rope_angles,
    ops.Rope: _rope,
    ops.WriteRows: _write_rows,
    ops.GatherHeads: _gather_heads,
    ops.LocalHeads: _single(lambda s: Case(ops.LocalHeads(s.group), (s.real(s.tokens, HEADS, LATENT),))),
    ops.HistoryAttention: _history,
    ops.CurrentAttention: _current,
    ops.ExpandedAttention: _expanded,
    ops.AllToAll: _all_to_all,
    ops.Combine: _combine,
    ops.VUp: _v_up,
    ops.SplitTokens: _single(lambda s: Case(ops.SplitTokens(s.tokens // 2), (s.real(s.tokens, HIDDEN),))),
    ops.AllReduce: _single(lambda s: Case(ops.AllReduce(s.group), (s.real(s.tokens, HIDDEN),))),
    ops.Embedding: _embedding,
    ops.Swiglu: _single(lambda s: Case(ops.Swiglu(), (s.real(s.tokens, 2 * EXPERT),))),
    ops.GatingTopK: _gating,
    ops.DispatchTokens: _dispatch,
    ops.PermuteTokens: _permute,
    ops.CombineTokens: _combine_tokens,
    ops.GroupedLinear: _grouped_linear,
    ops.QuantLinear: _quant_linear,
    ops.QuantGroupedLinear: _quant_grouped,
    QuantExperts: _quant_experts,
    QuantMlp: _quant_mlp,
    AddRmsNorm: _single(lambda s: Case(AddRmsNorm(1e-6), (*(s.real(s.tokens, HIDDEN),) * 2, s.real(HIDDEN)))),
    NormRopeWrite: _norm_rope_write,
    RopePair: _rope_pair,
    ops.AllGather: _single(
        lambda s: Case(ops.AllGather(VOCABULARY, s.group), (s.real(s.tokens, -(-VOCABULARY // s.ranks)),))
    ),
}


def cases(op: type[Op], step: Step) -> list[Case]:
    """Raises `LookupError` for an op with parameters that nobody has given sizes."""
    if op in SIZES:
        return SIZES[op](step)
    if attrs.fields(op):
        raise LookupError(f"no sizes for op {op.__name__}: add them to {__name__}")
    return _by_letters(op, step)
