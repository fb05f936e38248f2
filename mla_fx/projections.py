"""Per-token functions: embedding, projections, norms, rotation.

Values in, values out; formulas are with the ops.
"""

from mla_fx.config import MlaConfig
from mla_fx.effects import Group, Value, bind, ops
from mla_fx.parameters import Quantized
from mla_fx.rope import frequencies


def embedding(tokens: Value, table: Value, *, vocabulary: int, group: Group) -> Value:
    """This rank's part of the embeddings: `tokens` int64 [T], `table` [A, D] -> [T, D].  See `ops.Embedding`."""
    return bind(ops.Embedding(vocabulary, group), tokens, table, names=("part",))[0]


def take_rows(x: Value, rows: Value, *, name: str = "out") -> Value:
    """`x` [T, D], `rows` int64 [O] -> [O, D].  See `ops.TakeRows`."""
    return bind(ops.TakeRows(), x, rows, names=(name,))[0]


def split_tokens(x: Value, *, count: int) -> tuple[Value, Value]:
    """The first `count` tokens of `x` [T, D], and the rest.  See `ops.SplitTokens`."""
    first, rest = bind(ops.SplitTokens(count), x)
    return first, rest


def join_tokens(first: Value, rest: Value, *, name: str = "out") -> Value:
    """[T, D] and [J, D], one below the other -> [T + J, D].  See `ops.JoinTokens`."""
    return bind(ops.JoinTokens(), first, rest, names=(name,))[0]


def linear(x: Value, weight: Value | Quantized[Value], *, name: str = "out") -> Value:
    """`x` [T, D] times `weight` [F, D] transposed -> [T, F].  See `ops.Linear`, and `ops.QuantLinear` for 8 bits."""
    if isinstance(weight, Quantized):
        return bind(ops.QuantLinear(), x, *weight, names=(name,))[0]
    return bind(ops.Linear(), x, weight, names=(name,))[0]


def swiglu(x: Value, *, name: str = "out") -> Value:
    """Gate and up [T, 2 F] -> [T, F].  See `ops.Swiglu`."""
    return bind(ops.Swiglu(), x, names=(name,))[0]


def rms_norm(x: Value, weight: Value, *, epsilon: float, name: str = "out") -> Value:
    """RMSNorm of the first F features of `x` [T, D], `weight` [F] -> [T, F].  See `ops.RmsNorm`."""
    return bind(ops.RmsNorm(epsilon), x, weight, names=(name,))[0]


def add(x: Value, y: Value, *, name: str = "out") -> Value:
    """`x` + `y`, both [T, D].  See `ops.Add`."""
    return bind(ops.Add(), x, y, names=(name,))[0]


def absorb_query(q: Value, w_uk: Value, *, rope: int) -> Value:
    """Query [T, N * Q] and `w_uk` [N, P, L] -> query in the latent [T, N, L].  See `ops.AbsorbQuery`."""
    return bind(ops.AbsorbQuery(rope), q, w_uk)[0]


def rope_angles(positions: Value, like: Value, *, config: MlaConfig, rounded: bool = False) -> tuple[Value, Value]:
    """`positions` int64 [T] -> cosine and sine [T, R], fp32 (fp64 when `like` is), or `rounded` to the dtype of `like`.

    See `ops.RopeAngles`.
    """
    magnitude = config.yarn.angle_magnitude if config.yarn else 1.0
    cos, sin = bind(ops.RopeAngles(frequencies(config), magnitude, rounded), positions, like)
    return cos, sin


def rope(x: Value, cos: Value, sin: Value, *, heads: int | None = None, name: str = "out") -> Value:
    """Rotate the last R features of every head of `x` -> [T, heads, R], or [T, R] without heads.  See `ops.Rope`."""
    return bind(ops.Rope(heads), x, cos, sin, names=(name,))[0]


def v_up(attn: Value, w_uv: Value, *, group: Group | None = None, flat: bool = True) -> Value:
    """Latents [T, N, L] and `w_uv` [N, L, V], or of all heads of a group -> [T, N * V] or [T, N, V].  See `ops.VUp`."""
    return bind(ops.VUp(group, flat), attn, w_uv)[0]


def prefetch(weight: Value, after: Value) -> None:
    """Bring a weight into the device's cache once `after` is there: a hint, without a result.  See `ops.Prefetch`."""
    bind(ops.Prefetch(), weight, after)
