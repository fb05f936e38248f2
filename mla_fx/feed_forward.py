"""The feed-forward half of a decoder layer: one network, or routed and shared experts.

Values in, values out; formulas are with the ops.  What a rank gives
is its part of a sum over the ranks.
"""

from mla_fx.config import MoeConfig
from mla_fx.effects import Group, Value, bind, ops, scope
from mla_fx.parameters import MlpParams, MoeParams, Quantized
from mla_fx.projections import add, linear, swiglu


def mlp(x: Value, params: MlpParams[Value], *, name: str = "part") -> Value:
    """This rank's columns of `down(silu(gate(x)) * up(x))`, [T, D] -> [T, D]."""
    return linear(swiglu(linear(x, params.gate_up_proj, name="gate_up"), name="act"), params.down_proj, name=name)


def moe(x: Value, params: MoeParams[Value], *, config: MoeConfig, group: Group, among: Group) -> Value:
    """This rank's part of the experts, to be summed over `among`, and its columns of the shared ones: [T, D] -> [T, D].

    The ranks of `group` share out the experts, and those of `among` have the same tokens.  Where these are all ranks,
    each sees to the tokens that chose its experts; else tokens go to the ranks of their experts, and back.
    """
    weights, experts = gating(gate_logits(x, params.gate), params.e_score_correction_bias, config=config)
    own = group.share(config.n_routed_experts)
    if group.size == among.size:
        routed = routed_experts(x, weights, experts, params, own=own, group=group)
    else:
        with scope("dispatched"):
            rows, row_weights, row_experts, counts = dispatch_tokens(
                x, weights, experts, own=own, group=group, among=among
            )
            parts = routed_experts(rows, row_weights, row_experts, params, own=own, group=group)
        routed = combine_tokens(parts, experts, counts, own=own, group=group, among=among)
    if not isinstance(params.shared_experts, MlpParams):
        return routed
    with scope("shared_experts"):
        shared = mlp(x, params.shared_experts, name="shared")
    return add(routed, shared, name="part")


def routed_experts(
    x: Value, weights: Value, experts: Value, params: MoeParams[Value], *, own: int, group: Group
) -> Value:
    """This rank's experts, weighted, for the tokens that chose them: `x` [T, D] -> [T, D]."""
    rows, counts, source = permute_tokens(x, experts, own=own, group=group)
    rows = swiglu(grouped_linear(rows, params.gate_up_proj, counts, name="gate_up"), name="act")
    rows = grouped_linear(rows, params.down_proj, counts, name="rows")
    return unpermute_tokens(rows, source, weights)


def gate_logits(x: Value, weight: Value) -> Value:
    """`x` [T, D], `weight` [X, D] -> [T, X] float32.  See `ops.GateLogits`."""
    return bind(ops.GateLogits(), x, weight)[0]


def gating(logits: Value, bias: Value, *, config: MoeConfig) -> tuple[Value, Value]:
    """`logits` [T, X], `bias` [X] -> weights [T, U] and experts int32 [T, U].  See `ops.GatingTopK`."""
    op = ops.GatingTopK(
        top_k=config.num_experts_per_tok,
        groups=config.groups,
        top_groups=config.top_groups,
        scoring=config.scoring_func,
        group_score="top2" if config.topk_method == "noaux_tc" else "max",
        normalise=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
    )
    weights, experts = bind(op, logits, bias)
    return weights, experts


def dispatch_tokens(
    x: Value, weights: Value, experts: Value, *, own: int, group: Group, among: Group
) -> tuple[Value, Value, Value, Value]:
    """Tokens to the ranks of their experts: rows [J, D], weights [J, U], experts [J, U], counts [W].

    See `ops.DispatchTokens`.
    """
    rows, row_weights, row_experts, counts = bind(ops.DispatchTokens(own, group, among), x, weights, experts)
    return rows, row_weights, row_experts, counts


def combine_tokens(rows: Value, experts: Value, counts: Value, *, own: int, group: Group, among: Group) -> Value:
    """What ranks have made of each token, added up: [T, D].  See `ops.CombineTokens`."""
    return bind(ops.CombineTokens(own, group, among), rows, experts, counts, names=("routed",))[0]


def permute_tokens(x: Value, experts: Value, *, own: int, group: Group) -> tuple[Value, Value, Value]:
    """Tokens of this rank's experts, expert after expert: rows [T U, D], counts [Y], source [T, U].

    See `ops.PermuteTokens`.
    """
    rows, counts, source = bind(ops.PermuteTokens(own, group), x, experts)
    return rows, counts, source


def grouped_linear(rows: Value, weight: Value | Quantized[Value], counts: Value, *, name: str = "out") -> Value:
    """`rows` [Z, D] times each expert's `weight` [Y, F, D] -> [Z, F].  See `ops.GroupedLinear`."""
    if isinstance(weight, Quantized):
        return bind(ops.QuantGroupedLinear(), rows, *weight, counts, names=(name,))[0]
    return bind(ops.GroupedLinear(), rows, weight, counts, names=(name,))[0]


def unpermute_tokens(rows: Value, source: Value, weights: Value) -> Value:
    """Experts' rows back at their tokens, weighted: [T, D].  See `ops.UnpermuteTokens`."""
    return bind(ops.UnpermuteTokens(), rows, source, weights, names=("routed",))[0]
