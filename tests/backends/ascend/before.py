"""The attention of a layer as it was done before: exchange aside, in float32 copies, the current part packed.

The history output goes through `.float()` before the exchange, the current
part is packed behind what was received, all is merged in float32 and cast
back, and V-up transposes twice around a batched product.  The rest is the
layer of `mla_fx.decode`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from attrs import frozen

from mla_fx import (
    absorb_query,
    all_reduce,
    all_to_all,
    current_attention,
    gather_heads,
    history_attention,
    linear,
    rms_norm,
    rope,
    rope_angles,
    write_cache,
)
from mla_fx.backends import Rule, Run
from mla_fx.backends.ascend import combine
from mla_fx.decode import attention_avals, batch_avals, cache_avals, query
from mla_fx.effects import Aval, Op, Orchestration, Step, bind, ops, parameters, trace
from tests.setups import Setup


@frozen
class Widen(Op):
    """`hist` [T, H, L] -> the same in float32."""

    operands: ClassVar = {"hist": "T H L"}
    results: ClassVar = ("wide",)

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        return (Aval((axes["T"], axes["H"], axes["L"]), "fp32"),)


@frozen
class PackCurrent(Op):
    """`recv` [W, T, N, L], `recv_lse` [W, T, N], `cur` [T, N, L], `cur_lse` [T, N] -> the same with W + 1, float32."""

    operands: ClassVar = {
        "recv": "W T N L wide",
        "recv_lse": "W T N wide",
        "cur": "T N L",
        "cur_lse": "T N wide",
    }
    results: ClassVar = ("packed", "packed_lse")

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        rows = (axes["W"] + 1, axes["T"], axes["N"])
        return Aval((*rows, axes["L"]), "fp32"), Aval(rows, "fp32")


@frozen
class MergePacked(Op):
    """`packed` [W, T, N, L] and `packed_lse` [W, T, N] float32, `like` [T, N, L] -> [T, N, L] in its dtype."""

    operands: ClassVar = {"packed": "W T N L wide", "packed_lse": "W T N wide", "like": "T N L"}
    results: ClassVar = ("attn",)

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        return (Aval((axes["T"], axes["N"], axes["L"]), dtype),)


@frozen
class TransposedVUp(Op):
    """`attn` [T, N, L], `w_uv` [N, L, V] -> [T, N * V]."""

    operands: ClassVar = {"attn": "T N L", "w_uv": "N L V"}
    results: ClassVar = ("heads",)

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        return (Aval((axes["T"], axes["N"] * axes["V"]), dtype),)


def widen(hist: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
    return (hist.float(),)


def pack_current(
    recv: torch.Tensor, recv_lse: torch.Tensor, cur: torch.Tensor, cur_lse: torch.Tensor, *, run: Run
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat((recv, cur.float().unsqueeze(0))), torch.cat((recv_lse, cur_lse.unsqueeze(0)))


def merge_packed(
    packed: torch.Tensor, packed_lse: torch.Tensor, like: torch.Tensor, *, run: Run
) -> tuple[torch.Tensor]:
    (merged,) = combine.rule(packed[:-1], packed_lse[:-1], packed[-1], packed_lse[-1], run=run, flat=False)
    return (merged.to(like.dtype),)


def transposed_v_up(attn: torch.Tensor, w_uv: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
    return (torch.bmm(attn.transpose(0, 1), w_uv).transpose(0, 1).reshape(attn.shape[0], -1),)


RULES: Mapping[type[Op], Rule] = {
    Widen: widen,
    PackCurrent: pack_current,
    MergePacked: merge_packed,
    TransposedVUp: transposed_v_up,
}
#: The copies and the exchange on the communication stream, all computation on main.
exchange_aside = Orchestration(
    "exchange-aside", lambda e: "comm" if isinstance(e.op, Widen | ops.AllToAll) else "main", streams=("comm",)
)


def step(setup: Setup) -> Step:
    """`attention_step` in the way of before: the same inputs, the same outputs."""
    config, shape = setup.config, setup.shape

    def attention(params: Any, cache: Any, hidden: Any, batch: Any) -> tuple[Any, Any]:
        angles, scale = rope_angles(batch.positions, hidden, config=config), config.softmax_scale
        q = query(hidden, params.query, epsilon=config.latent_norm_eps)
        q_latent = absorb_query(q, params.w_uk, rope=config.qk_rope_head_dim)
        q_rope = rope(q, *angles, heads=params.w_uk.aval.shape[0], name="q_rope")
        kv = linear(hidden, params.kv_a_proj, name="kv")
        latent = rms_norm(kv, params.kv_a_layernorm, epsilon=config.latent_norm_eps, name="latent")
        k_rope = rope(kv, *angles, name="k_rope")
        cache = write_cache(cache, latent, k_rope, batch.slots)
        q_all = gather_heads(q_latent, q_rope, group=shape.dcp)
        hist, hist_lse = history_attention(
            *q_all, cache, batch.block_table, batch.query_lengths, batch.history_lengths, scale=scale
        )
        recv = all_to_all(*bind(Widen(), hist), hist_lse, group=shape.dcp)
        cur, cur_lse = current_attention(q_latent, q_rope, latent, k_rope, batch.query_lengths, scale=scale)
        packed = bind(PackCurrent(), *recv, cur, cur_lse)
        (heads,) = bind(TransposedVUp(), *bind(MergePacked(), *packed, cur), params.w_uv)
        return all_reduce(linear(heads, params.o_proj, name="part"), group=shape.tp), cache

    return trace(
        attention,
        "attention_before",
        params=parameters(attention_avals(config, shape)),
        cache=cache_avals(config, shape),
        hidden=Aval((shape.tokens, config.hidden_size), shape.dtype),
        batch=batch_avals(shape),
    )
