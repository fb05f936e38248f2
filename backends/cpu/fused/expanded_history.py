"""History attention of prompts with a key and a value of every head, where that is less work than in the latent.

For token t of request b, with the keys j < history_lengths[b] of the shard,

    k[j, n]     = w_uk[n] c[j]               v[j, n] = c[j] w_uv[n]
    s[j]        = scale * (q[t, n] . k[j, n] + q_rope[t, n] . k_rope[j])
    lse[t, n]   = log sum_j exp s[j]
    hist[t, n]  = sum_j exp(s[j] - lse[t, n]) * v[j, n]

is what `absorb_query`, `history_attention` and `v_up` compute in the latent.
Multiply-adds of a head, for a request of n new tokens and m keys:

    absorbed    n L (P + V) + n m (2 L + R)
    expanded    m L (P + V) + n m (P + R + V)

so each request takes the form that is less: for DeepSeek-V3 the expanded one
from about 171 new tokens on, whatever the history.  Found in steps that expand
their current part (`mla_fx.passes.expand_current`), where the rank has the
queries and both matrices of all heads: alone in its context group, or with
`replicate_query`.  Every other backend runs the op by its definition.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Final

import torch
from attrs import evolve, field, frozen

from mla_fx.backends.cpu import absorb_query, history_attention, v_up
from mla_fx.backends.cpu.expanded_attention import HEADS, attend, expanded, parts
from mla_fx.backends.device import Run
from mla_fx.backends.table import Fusion
from mla_fx.dtypes import wide
from mla_fx.effects import Aval, Equation, Found, Op, Step, Value, bind, ops, rewrite
from mla_fx.effects.aval import ShapeError, wide_dtype
from mla_fx.effects.validate import number, word

#: Keys that are expanded at a time: those of 4 heads of DeepSeek-V3 take 5 MiB in float32.
KEYS: Final = 1024


@frozen
class ExpandedHistory(Op):
    """Queries of all H heads, not absorbed, over the paged shard.

    `q` [T, H * (P + R)], `q_rope` [T, H, R], `w_uk` [H, P, L], `w_uv` [H, L, V], caches, table and lengths as in
    `ops.HistoryAttention` -> `hist` [T, H, V] in the query dtype, `hist_lse` [T, H] float32 (float64 beside float64).
    """

    scale: float = field(validator=number(above=0))
    workspace: str = field(default=ops.WORKSPACE, validator=word)
    operands: ClassVar = {
        "q": "T D",
        "q_rope": "T H R",
        "latent_cache": "C S L",
        "rope_cache": "C S R",
        "block_table": "B M int32",
        "query_lengths": "B host",
        "history_lengths": "B host",
        "w_uk": "H P L",
        "w_uv": "H L V",
    }
    results: ClassVar = ("hist", "hist_lse")

    @property
    def uses(self) -> tuple[str, ...]:
        """Its workspace, by name."""
        return (self.workspace,)

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """Heads of P + R features, side by side."""
        if axes["D"] != (want := axes["H"] * (axes["P"] + axes["R"])):
            raise ShapeError(f"{self.name}: axis 1 of q must be H * (P + R) = {want}: got {axes['D']}")
        shape = (axes["T"], axes["H"])
        return Aval((*shape, axes["V"]), dtype), Aval(shape, wide_dtype(dtype))

    def work(self, axes: Mapping[str, int], lengths: Mapping[str, Sequence[int]]) -> int:
        """Of each request, in the form that is less."""
        pairs = zip(lengths["query_lengths"], lengths["history_lengths"], strict=True)
        sizes = tuple(axes[name] for name in "LPRV")
        return axes["H"] * sum(min(multiply_adds(n, m, *sizes)) for n, m in pairs if n and m)

    def value_rule(self, avals: Mapping[str, Aval], values: Mapping[str, Any]) -> None:
        """As in the latent: of the queries only how many there are is looked at."""
        ops.HistoryAttention(self.scale).value_rule({**avals, "q_latent": avals["q_rope"]}, values)

    def definition(self, *operands: Value) -> tuple[Value, ...]:
        """In the latent: the query absorbed, the values projected up behind."""
        q, q_rope, *cache, w_uk, w_uv = operands
        (q_latent,) = bind(ops.AbsorbQuery(q_rope.aval.shape[2]), q, w_uk)
        hist, hist_lse = bind(ops.HistoryAttention(self.scale, self.workspace), q_latent, q_rope, *cache)
        return (*bind(ops.VUp(flat=False), hist, w_uv), hist_lse)


def multiply_adds(new: int, keys: int, latent: int, nope: int, rope: int, value: int) -> tuple[int, int]:
    """Of a head, absorbed and expanded, for a request with so many new tokens and keys.

    >>> [expanded < absorbed for n in (171, 180) for absorbed, expanded in [multiply_adds(n, 8192, 512, 128, 64, 128)]]
    [True, True]
    >>> [expanded < absorbed for n in (1, 150) for absorbed, expanded in [multiply_adds(n, 8192, 512, 128, 64, 128)]]
    [False, False]
    """
    each = latent * (nope + value)
    return new * each + new * keys * (2 * latent + rope), keys * each + new * keys * (nope + rope + value)


def takes(op: ExpandedHistory, *avals: Aval) -> str | None:
    """Everything."""
    return None


def rule(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    rope_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_lengths: tuple[int, ...],
    history_lengths: tuple[int, ...],
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    *,
    run: Run,
    scale: float,
    workspace: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each request in the form that is less work; in float32 (float64 beside float64), result in the query dtype."""
    heads, nope, latent = w_uk.shape
    rope, value, kind = q_rope.shape[2], w_uv.shape[2], wide(q.dtype)
    hist, lse = q.new_zeros(len(q), heads, value), q.new_full((len(q), heads), -math.inf, dtype=kind)
    absorbed: list[tuple[int, slice]] = []
    end = 0
    for b, (new, keys) in enumerate(zip(query_lengths, history_lengths, strict=True)):
        rows, end = slice(end, end + new), end + new
        if not new or not keys:
            continue
        in_latent, by_head = multiply_adds(new, keys, latent, nope, rope, value)
        if in_latent <= by_head:
            absorbed.append((b, rows))
            continue
        table = block_table[b, : -(-keys // latent_cache.shape[1])]
        queries = torch.cat([q[rows].view(new, heads, nope + rope)[..., :nope], q_rope[rows]], 2).to(kind)
        for own in parts(heads, HEADS):
            tiles = _tiles((latent_cache, rope_cache), table, keys)
            part, sums = _over(queries[:, own], tiles, w_uk[own].to(kind), w_uv[own].to(kind), scale)
            hist[rows, own], lse[rows, own] = part, sums
    if absorbed:
        some = torch.cat([torch.arange(rows.start, rows.stop) for _, rows in absorbed])
        numbers = [b for b, _ in absorbed]
        lengths = [tuple(of[b] for b in numbers) for of in (query_lengths, history_lengths)]
        runs = (run,)
        ((q_latent,),) = absorb_query.several((q[some],), (w_uk,), runs=runs, rope=rope)
        cache: tuple[Any, ...] = (latent_cache, rope_cache, block_table[numbers], *lengths)
        operands = [(one,) for one in (q_latent, q_rope[some], *cache)]
        (part,), (sums,) = history_attention.several(*operands, runs=runs, scale=scale, workspace=workspace)
        ((hist[some],),) = v_up.several((part,), (w_uv,), runs=runs, group=None, flat=False)
        lse[some] = sums
    return hist, lse


def _tiles(caches: Sequence[torch.Tensor], table: torch.Tensor, keys: int) -> Any:
    """Latents and ropes of the keys, some blocks at a time."""
    size = caches[0].shape[1]
    step = max(1, KEYS // size)
    for first in range(0, len(table), step):
        left = keys - first * size
        yield [cache.index_select(0, table[first : first + step]).flatten(0, 1)[:left] for cache in caches]


def _over(
    queries: torch.Tensor, tiles: Any, up_k: torch.Tensor, up_v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [n, N, V] and LSE [n, N] of `queries` [n, N, P + R] over all tiles, merged by their LSEs."""
    out = lse = None
    for tile in tiles:
        latent, k_rope = (part.to(queries.dtype) for part in tile)
        part, sums = attend(queries, expanded(latent, k_rope, up_k, up_v), scale=scale, causal=False)
        if out is None or lse is None:
            out, lse = part, sums
            continue
        both = torch.logaddexp(lse, sums)
        out.mul_((lse - both).exp_().unsqueeze(2)).addcmul_(part, (sums - both).exp_().unsqueeze(2))
        lse = both
    assert out is not None and lse is not None
    return out, lse


def find(step: Step) -> Step:
    """The step with the history of every layer whose current part is expanded made one op, where all heads are here."""
    of = {name: equation for equation in step.equations for name in equation.results}
    current = {e.operands[0] for e in step.equations if isinstance(e.op, ops.ExpandedAttention)}
    before: set[tuple[str, ...]] = set()  # results of what the absorbed query comes from

    def match(step: Step, up: Equation) -> Found | None:
        history = of.get(up.operands[0])
        if not isinstance(up.op, ops.VUp) or history is None or not isinstance(history.op, ops.HistoryAttention):
            return None
        q_latent, q_rope, *cache = history.operands
        gather = of.get(q_latent)
        if gather is not None and isinstance(gather.op, ops.GatherHeads) and gather.op.group.size == 1:
            before.add(gather.results)
            q_latent, q_rope = gather.operands
        absorb = of.get(q_latent)
        if absorb is None or not isinstance(absorb.op, ops.AbsorbQuery) or absorb.operands[0] not in current:
            return None
        before.add(absorb.results)
        q, w_uk = absorb.operands
        op = ExpandedHistory(history.op.scale, history.op.workspace)
        operands = (q, q_rope, *cache, w_uk, up.operands[1])
        return Found((history, up), Equation(op, operands, (*up.results, history.results[1]), history.tag))

    return _without(rewrite(step, match), before)


def _without(step: Step, some: Collection[tuple[str, ...]]) -> Step:
    """The step without those of some equations, by their results, whose results nobody takes any more."""
    needed, kept = set(step.outputs), list[Equation]()
    for equation in reversed(step.equations):
        if equation.results in some and needed.isdisjoint(equation.results):
            continue
        kept.append(equation)
        needed.update(equation.operands)
    return evolve(step, equations=tuple(kept[::-1]))


FUSION: Final = Fusion(ExpandedHistory, rule, takes, find)
