"""What crosses the ranks, and the merge.  Descriptors in, descriptors out; formulas are with the ops."""

from mla_fx.effects import Value, bind, ops


def gather_heads(q_latent: Value, q_rope: Value, *, ranks: int) -> tuple[Value, Value]:
    """Queries of own heads [T, N, L], [T, N, R] -> of all heads of the group [T, H, L], [T, H, R].

    See `ops.GatherHeads`.
    """
    latent, rope = bind(ops.GatherHeads(ranks), q_latent, q_rope)
    return latent, rope


def local_heads(q: Value, *, ranks: int, name: str = "q_local") -> Value:
    """Queries of all heads [T, H, D] -> of own heads [T, N, D].  See `ops.LocalHeads`."""
    return bind(ops.LocalHeads(ranks), q, names=(name,))[0]


def all_to_all(out: Value, lse: Value, *, ranks: int) -> Value:
    """History partials of all heads [T, H, L], [T, H] -> own heads' partials of all ranks [W, T, N, E].

    See `ops.AllToAll`; the LSE's bits are the last lanes.
    """
    return bind(ops.AllToAll(ranks), out, lse)[0]


def combine(recv: Value, local: Value, local_lse: Value) -> Value:
    """Received history partials [W, T, N, E] and the local part [T, N, L], [T, N] -> merged [T, N, L].

    See `ops.Combine`.
    """
    return bind(ops.Combine(), recv, local, local_lse)[0]


def all_reduce(x: Value, *, name: str = "out") -> Value:
    """Sum of `x` [T, D] over the group.  See `ops.AllReduce`."""
    return bind(ops.AllReduce(), x, names=(name,))[0]


def all_gather(x: Value, *, features: int, ranks: int, name: str = "out") -> Value:
    """The ranks' features [T, F] side by side -> [T, features].  See `ops.AllGather`."""
    return bind(ops.AllGather(features, ranks), x, names=(name,))[0]
