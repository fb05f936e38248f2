"""What crosses the ranks, and the merge.  Values in, values out; formulas are with the ops."""

from mla_fx.effects import Group, Value, bind, ops


def gather_heads(q_latent: Value, q_rope: Value, *, group: Group) -> tuple[Value, Value]:
    """Queries of own heads [T, N, L], [T, N, R] -> of all heads of the group [T, H, L], [T, H, R].

    See `ops.GatherHeads`.
    """
    latent, rope = bind(ops.GatherHeads(group), q_latent, q_rope)
    return latent, rope


def local_heads(q: Value, *, group: Group, name: str = "q_local") -> Value:
    """Queries of all heads [T, H, D] -> of own heads [T, N, D].  See `ops.LocalHeads`."""
    return bind(ops.LocalHeads(group), q, names=(name,))[0]


def all_to_all(out: Value, lse: Value, *, group: Group) -> tuple[Value, Value]:
    """History partials of all heads [T, H, L], [T, H] -> own heads' of all ranks [W, T, N, L], [W, T, N].

    See `ops.AllToAll`.
    """
    recv, recv_lse = bind(ops.AllToAll(group), out, lse)
    return recv, recv_lse


def combine(recv: Value, recv_lse: Value, local: Value, local_lse: Value, *, flat: bool = False) -> Value:
    """Received history partials [W, T, N, L], [W, T, N] and the local part [T, N, L], [T, N] -> merged [T, N, L].

    Or, flat, [T, N * L].  See `ops.Combine`.
    """
    return bind(ops.Combine(flat), recv, recv_lse, local, local_lse)[0]


def all_reduce(x: Value, *, group: Group, name: str = "out") -> Value:
    """Sum of `x` [T, D] over the group.  See `ops.AllReduce`."""
    return bind(ops.AllReduce(group), x, names=(name,))[0]


def all_gather(x: Value, *, features: int, group: Group, name: str = "out") -> Value:
    """The ranks' features [T, F] side by side -> [T, features].  See `ops.AllGather`."""
    return bind(ops.AllGather(features, group), x, names=(name,))[0]
