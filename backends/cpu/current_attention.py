"""CPU rule of `ops.CurrentAttention`: the compiled kernel, or the shared rule where there is none or in float64."""

from collections.abc import Sequence

from mla_fx.backends.common import current_attention as shared
from mla_fx.backends.cpu.kernel import Tensors, attention
from mla_fx.backends.cpu.kernel.attention import Lengths
from mla_fx.backends.cpu.together import one_by_one
from mla_fx.backends.device import Run


def several(
    q_latent: Tensors,
    q_rope: Tensors,
    latent: Tensors,
    k_rope: Tensors,
    query_lengths: Lengths,
    *,
    runs: Sequence[Run],
    scale: float,
    workspace: str,
) -> Sequence[Tensors]:
    """Scores, softmax and accumulation in float32 (float64 beside float64); result in the query dtype."""
    operands = (q_latent, q_rope, latent, k_rope, query_lengths)
    if attention.serves(q_latent[0], latent[0], k_rope[0]):
        return attention.current(*operands, scale)
    return one_by_one(shared.rule, *operands, runs=runs, scale=scale, workspace=workspace)
