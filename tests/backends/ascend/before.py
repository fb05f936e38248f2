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
    attention_step,
    current_attention,
    history_attention,
    linear,
    rms_norm,
    rope,
    rope_angles,
    write_cache,
)
from mla_fx.backends.ascend import combine
from mla_fx.decode import query, spread_heads
from mla_fx.effects import MAIN, Aval, Call, Op, Step, bind, ops
from mla_fx.payload import pack, unpack
from tests.setups import Setup


@frozen
class Widen(Op):
    """`hist` [T, H, L] -> the same in float32."""

    operands: ClassVar = ("hist",)
    results: ClassVar = ("wide",)

    def shape_rule(self, hist: Aval) -> tuple[Aval, ...]:
        return (Aval(hist.shape, "fp32"),)


@frozen
class PackCurrent(Op):
    """`recv` [W, T, N, E], `cur` [T, N, L], `cur_lse` [T, N] -> [W + 1, T, N, E] float32."""

    operands: ClassVar = ("recv", "cur", "cur_lse")
    results: ClassVar = ("packed",)

    def shape_rule(self, recv: Aval, cur: Aval, cur_lse: Aval) -> tuple[Aval, ...]:
        return (Aval((recv.shape[0] + 1, *recv.shape[1:]), "fp32"),)


@frozen
class MergePacked(Op):
    """`packed` [W + 1, T, N, E] float32, `like` of any shape -> [T, N, L] in the dtype of `like`."""

    operands: ClassVar = ("packed", "like")
    results: ClassVar = ("attn",)

    def shape_rule(self, packed: Aval, like: Aval) -> tuple[Aval, ...]:
        return (Aval((*packed.shape[1:3], packed.shape[3] - 1), like.dtype),)


@frozen
class TransposedVUp(Op):
    """`attn` [T, N, L], `w_uv` [N, L, V] -> [T, N * V]."""

    operands: ClassVar = ("attn", "w_uv")
    results: ClassVar = ("heads",)

    def shape_rule(self, attn: Aval, w_uv: Aval) -> tuple[Aval, ...]:
        return (Aval((attn.shape[0], w_uv.shape[0] * w_uv.shape[2]), attn.dtype),)


def pack_current(recv: torch.Tensor, cur: torch.Tensor, cur_lse: torch.Tensor) -> tuple[torch.Tensor]:
    return (torch.cat((recv, pack(cur.float(), cur_lse, ranks=1))),)


def merge_packed(packed: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor]:
    local, lse = unpack(packed[-1], latent=packed.shape[3] - 1)
    (merged,) = combine.rule(packed[:-1], local, lse)
    return (merged.to(like.dtype),)


def transposed_v_up(attn: torch.Tensor, w_uv: torch.Tensor) -> tuple[torch.Tensor]:
    return (torch.bmm(attn.transpose(0, 1), w_uv).transpose(0, 1).reshape(attn.shape[0], -1),)


RULES: Mapping[type[Op], Any] = {
    Widen: lambda hist: (hist.float(),),
    PackCurrent: pack_current,
    MergePacked: merge_packed,
    TransposedVUp: transposed_v_up,
}


def exchange_aside(call: Call) -> str:
    """The copies and the exchange on the communication stream, all computation on main."""
    return "comm" if isinstance(call.op, Widen | ops.AllToAll) else MAIN


def step(setup: Setup) -> Step:
    """`attention_step` in the way of before: the same inputs, the same outputs."""
    config, shape = setup.config, setup.shape
    inputs = attention_step(config, shape).arguments
    params, cache, x, batch = (inputs[name] for name in ("params", "cache", "hidden", "batch"))
    angles, scale = rope_angles(batch.positions, x, config=config), config.softmax_scale
    q = query(x, params.query, epsilon=config.latent_norm_eps)
    q_latent = absorb_query(q, params.w_uk, rope=config.qk_rope_head_dim)
    q_rope = rope(q, *angles, heads=params.w_uk.aval.shape[0], name="q_rope")
    kv = linear(x, params.kv_a_proj, name="kv")
    latent = rms_norm(kv, params.kv_a_layernorm, epsilon=config.latent_norm_eps, name="latent")
    k_rope = rope(kv, *angles, name="k_rope")
    cache = write_cache(cache, latent, k_rope, batch.slots)
    q_all, q_own = spread_heads(q_latent, q_rope, shape=shape)
    hist, hist_lse = history_attention(
        *q_all, cache, batch.block_table, batch.query_lengths, batch.history_lengths, scale=scale
    )
    (wide,) = bind(Widen(), hist)
    recv = all_to_all(wide, hist_lse, ranks=setup.ranks)
    cur, cur_lse = current_attention(*q_own, latent, k_rope, batch.query_lengths, scale=scale)
    (packed,) = bind(PackCurrent(), recv, cur, cur_lse)
    (attn,) = bind(MergePacked(), packed, cur)
    (heads,) = bind(TransposedVUp(), attn, params.w_uv)
    return Step("attention_before", inputs, (all_reduce(linear(heads, params.o_proj, name="part")), cache))
