"""The merge of what attention gave, as one operator: no part is masked, none is copied.

    attn = combine(*all_to_all(history_attention(..)), *current_attention(..))

`ops.Combine` takes any parts: what one that saw no key holds is selected away,
and a row that no part saw is 0.  Attention leaves nothing to select: such a
part is 0, and every row of a request sees a key, itself, in the current part.
Rows that no request owns have LSE 0 there and output 0 (`CurrentAttention` on
Ascend).  So npu_attention_update takes the parts as they have arrived.
"""

from collections.abc import Mapping
from typing import ClassVar, Final

import torch
from attrs import frozen

from mla_fx.backends.ascend import combine
from mla_fx.backends.ascend.calls import release
from mla_fx.backends.ascend.calls.merge import update
from mla_fx.backends.device import Run
from mla_fx.backends.table import Fusion
from mla_fx.effects import Aval, Equation, Found, Op, Step, Value, bind, ops, rewrite


@frozen
class MergeAttention(Op):
    """`ops.Combine` of parts that are 0 where they saw no key; every row of a request has a key in `local`.

    `recv` [W, T, N, L], `recv_lse` [W, T, N], `local` [T, N, L], `local_lse` [T, N] -> [T, N, L].
    """

    operands: ClassVar = ops.Combine.operands
    results: ClassVar = ops.Combine.results

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """As of any parts."""
        return ops.Combine().shape_rule(axes, dtype)

    def definition(self, *operands: Value) -> tuple[Value, ...]:
        """One normalisation over all parts."""
        return bind(ops.Combine(), *operands)


def takes(op: MergeAttention, *parts: Aval) -> str | None:
    """What is merged on Ascend."""
    return combine.takes(ops.Combine(), *parts)


def rule(
    recv: torch.Tensor, recv_lse: torch.Tensor, local: torch.Tensor, local_lse: torch.Tensor, *, run: Run
) -> tuple[torch.Tensor]:
    """One call, the local part last; more parts than it takes are merged in groups, by the rule for any parts."""
    tokens, heads, latent = local.shape
    if not tokens or len(recv) >= combine.parts(release.cann()):
        return combine.rule(recv, recv_lse, local, local_lse, run=run, flat=False)
    rows = [part.reshape(-1, latent) for part in (*recv, local)]
    lses = [part.reshape(-1) for part in (*recv_lse, local_lse)]
    merged, _ = update(lses, rows, 0)
    return (merged.view(tokens, heads, latent),)


def find(step: Step) -> Step:
    """The step with every merge of parts that come straight from attention as one operator."""
    maker = {name: equation for equation in step.equations for name in equation.results}

    def straight(names: tuple[str, ...], kind: type[Op]) -> Equation | None:
        """The equation of this kind whose results these are, all and in order."""
        made = maker.get(names[0])
        return made if made is not None and isinstance(made.op, kind) and made.results == names else None

    def match(step: Step, equation: Equation) -> Found | None:
        if equation.op != ops.Combine():
            return None
        sent = straight(equation.operands[:2], ops.AllToAll)
        if sent is None or straight(sent.operands, ops.HistoryAttention) is None:
            return None
        if straight(equation.operands[2:], ops.CurrentAttention) is None:
            return None
        return Found((equation,), Equation(MergeAttention(), equation.operands, equation.results, equation.tag))

    return rewrite(step, match)


FUSION: Final = Fusion(MergeAttention, rule, takes, find)
