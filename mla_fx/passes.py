"""Passes on the steps of a model: other ways to the same values, and effects that change none.

    replicate_query         every rank projects the queries of all heads, and nothing is gathered
    project_before_merge    values are projected before the exchange, so that V features of a head cross instead of L
    expand_current          a prompt's new tokens attend to keys and values of every head, where that is less work
    prefetch_weights        a projection's weight is fetched into the cache while the collective before it runs

The first two ask for parameters of other shapes, and change the inputs that have them; `mla_fx.weights` gives a
rank's part in that form, so a step that is made with `StepShape(replicate_query=True)` has been through the pass.
The third goes on from the second, with the same parameters; `expanding_saves` says when it is less work.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from attrs import evolve

from mla_fx.config import MlaConfig
from mla_fx.effects import Aval, Equation, Found, Op, Step, StepError, ops, rewrite
from mla_fx.effects.op import stem
from mla_fx.effects.step import Names

#: Ops that read a projection's weight, and which operand that is.
_READERS: Final[Mapping[type[Op], str]] = {ops.Linear: "weight", ops.QuantLinear: "weight", ops.VUp: "w_uv"}


def replicate_query(step: Step) -> Step:
    """Every rank projects all heads: what was gathered is there, and the current part takes its own heads of it.

        q = x . q_b_proj of all heads        q_own[t, n] = q[t, rank * N + n]

    The last projection of the query, and `w_uk`, are of all heads.  Source: vLLM's `dcp_q_replicate`.
    """
    avals, producer = step.avals(), _Producers(step)
    grown: dict[str, Aval] = {}
    renamed: dict[str, str] = {}
    new: dict[tuple[str, ...], Sequence[Equation]] = {}
    free = Names(set(avals))
    for gather in step.equations:
        if not isinstance(gather.op, ops.GatherHeads):
            continue
        group = gather.op.group
        absorb, rotate = producer(gather.operands[0], ops.AbsorbQuery), producer(gather.operands[1], ops.Rope)
        project = producer(absorb.operands[0], ops.Linear, ops.QuantLinear)
        for name in (absorb.operands[1], *project.operands[1:]):
            grown[name] = _times(avals[name], group.size)
        heads = avals[gather.operands[1]].shape[1] * group.size
        new[rotate.results] = (evolve(rotate, op=ops.Rope(heads)),)
        own = {name: free.unused(f"{name}_own") for name in gather.operands}
        new[gather.results] = [
            Equation(ops.LocalHeads(group), (name,), (taken,), gather.tag) for name, taken in own.items()
        ]
        renamed |= own | dict(zip(gather.results, gather.operands, strict=True))
    return _replaced(step, new, grown, renamed)


def project_before_merge(step: Step) -> Step:
    """Values are projected where their part was attended to, and merged as values.

        W_UV^T sum_i w[i] o[i] / sum_i w[i]  =  sum_i w[i] (W_UV^T o[i]) / sum_i w[i]

    The merge weighs a head's parts by numbers, so a matrix of the head may come before it.  V features and an LSE
    cross the wire for a head and token, not L and an LSE; each rank projects all H heads of its shard, for which
    `w_uv` is of all heads, and its N heads of the current part.  Source: vLLM PR #48196, ROCm ATOM #2001.
    """
    avals, producer = step.avals(), _Producers(step)
    grown: dict[str, Aval] = {}
    new: dict[tuple[str, ...], Sequence[Equation]] = {}
    free = Names(set(avals))
    for up in step.equations:
        if not isinstance(up.op, ops.VUp):
            continue
        merge = producer(up.operands[0], ops.Combine)
        exchange = producer(merge.operands[0], ops.AllToAll)
        (hist, hist_lse), (*received, cur, cur_lse), w_uv = exchange.operands, merge.operands, up.operands[1]
        group = exchange.op.group_of()
        grown[w_uv] = _times(avals[w_uv], group.size if group else 1)
        hist_v, cur_v = (free.unused(f"{name}_v") for name in (hist, cur))
        new[exchange.results] = (
            Equation(ops.VUp(flat=False), (hist, w_uv), (hist_v,), up.tag),
            evolve(exchange, operands=(hist_v, hist_lse)),
        )
        new[merge.results] = (
            Equation(ops.VUp(group, flat=False), (cur, w_uv), (cur_v,), up.tag),
            Equation(ops.Combine(flat=True), (*received, cur_v, cur_lse), up.results, merge.tag),
        )
        new[up.results] = ()
    return _replaced(step, new, grown)


def expand_current(step: Step) -> Step:
    """The current part with a key and a value of every head, which the new tokens' latents are expanded to.

        (w_uk[n]^T q) . latent[j]  =  q . (w_uk[n] latent[j])        W_UV^T sum_j p[j] latent[j]  =  sum_j p[j] v[j]

    Of a step that projects before it merges, where the current part is a part of values; any other is left as it
    is, since there the merge wants latents of it.  The history stays in the latent.  Source: the prompt's attention
    of DeepSeek-V2, which absorbs nothing; vLLM's and vLLM-Ascend's prefill.
    """
    producer = _Producers(step)

    def match(step: Step, up: Equation) -> Found | None:
        current = producer.of.get(up.operands[0])
        if not isinstance(up.op, ops.VUp) or current is None or not isinstance(current.op, ops.CurrentAttention):
            return None
        q_latent, q_rope, latent, k_rope, lengths = current.operands
        taken = producer(q_latent, ops.AbsorbQuery, ops.LocalHeads)
        own = isinstance(taken.op, ops.LocalHeads)
        absorb = producer(taken.operands[0], ops.AbsorbQuery) if own else taken
        q, w_uk = absorb.operands
        op = ops.ExpandedAttention(current.op.scale, up.op.group, current.op.workspace)
        operands = (q, q_rope, latent, k_rope, w_uk, up.operands[1], lengths)
        whole = Equation(op, operands, (*up.results, current.results[1]), current.tag)
        return Found((taken, current, up) if own else (current, up), whole)

    return rewrite(step, match)


def expanding_saves(
    config: MlaConfig, lengths: Sequence[int], *, plain: bool = False, behind: Sequence[int] | None = None
) -> int:
    """Multiply-adds of a head that `expand_current` saves where requests have these many new tokens.

        absorbed    pairs * (2 L + R)   + tokens * L V
        expanded    pairs * (P + R + V) + tokens * L (P + V)        pairs = sum over requests of n (n + 1) / 2

    Less than 0 where it costs more.  A step that is `plain` would else project no values before it merges, so the
    expanded form has nothing to set against its products: tokens * L V are not saved.  For DeepSeek-V3 it pays for
    a request of 170 new tokens, and of a plain step of 341.

    `behind`: keys before each request, on a backend that gives the history of an expanded step to each request in the
    form that is less, with all heads of its context group: in the latent, to which a request's tokens are brought for
    it alone, n L (P + V), or by head, m L (P + V) and n m (2 L - P - V) less.  Without history it is neither.

    >>> config = MlaConfig.deepseek_v3()
    >>> [expanding_saves(config, [n]) > 0 for n in (1, 64, 169, 170, 4096)]
    [False, False, False, True, True]
    >>> [expanding_saves(config, [n], plain=True) > 0 for n in (340, 341)]
    [False, True]
    >>> [expanding_saves(config, [n], plain=True, behind=[m]) > 0 for n, m in ((1, 0), (64, 0), (64, 64), (340, 64))]
    [True, True, False, True]
    """
    latent, nope, value = config.kv_lora_rank, config.qk_nope_head_dim, config.v_head_dim
    tokens, pairs = sum(lengths), sum(n * (n + 1) // 2 for n in lengths)
    each, of_pair = latent * (nope + value), 2 * latent - nope - value
    if behind is None:
        more = tokens * each
    else:
        more = sum(min(n * each, m * each - n * m * of_pair) for n, m in zip(lengths, behind, strict=True))
    return pairs * of_pair - more + (0 if plain else tokens * latent * value)


def prefetch_weights(step: Step) -> Step:
    """A prefetch before each collective, of every projection's weight that is read between it and the next one.

    It follows what the collective sends last (behind a history attention the LSEs, which are small to keep), and
    nothing waits for it.  Experts' weights are left out: which of them are read is not known yet.
    """
    parameters = {put.name for put in step.inputs if put.role == "parameter"}
    equations: list[Equation] = []  # from the last to the first
    read: list[str] = []
    for equation in reversed(step.equations):
        equations.append(equation)
        if equation.op.communicates:
            after = equation.operands[-1]
            equations += [Equation(ops.Prefetch(), (name, after), (), equation.tag) for name in reversed(read)]
            read = []
        elif type(equation.op) in _READERS:
            weight = equation.operands[list(equation.op.operands).index(_READERS[type(equation.op)])]
            read = [weight, *(name for name in read if name != weight)] if weight in parameters else read
    return evolve(step, equations=tuple(equations[::-1]))


class _Producers:
    """What gives each value of a step."""

    def __init__(self, step: Step) -> None:
        self.name = step.name
        self.of = {name: equation for equation in step.equations for name in equation.results}

    def __call__(self, name: str, *kinds: type[Op]) -> Equation:
        """The equation of one of these ops that gives a value; raises `StepError`."""
        found = self.of.get(name)
        if found is None or not isinstance(found.op, kinds):
            wanted = " or ".join(stem(kind) for kind in kinds)
            raise StepError(f"{self.name}: {name} must be a result of {wanted}: got '{found or name}'")
        return found


def _times(aval: Aval, ranks: int) -> Aval:
    """Of all ranks' heads, which are the first axis."""
    first, *rest = aval.shape
    return Aval((first * ranks, *rest), aval.dtype)


def _replaced(
    step: Step,
    new: Mapping[tuple[str, ...], Sequence[Equation]],
    grown: Mapping[str, Aval],
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> Step:
    """The step with `new` for the equations with these results; the others take what is `renamed`."""
    equations: list[Equation] = []
    for equation in step.equations:
        operands = tuple(renamed.get(name, name) for name in equation.operands)
        equations += new.get(equation.results, (evolve(equation, operands=operands),))
    inputs = tuple(evolve(put, aval=grown.get(put.name, put.aval)) for put in step.inputs)
    return evolve(step, inputs=inputs, equations=tuple(equations))
