"""What each emulated operator is refused for: a call, what is changed in it, and the message.

Values that are functions are called, on the device; the rest are taken as they are.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch
from attrs import field, frozen

from tests.backends.ascend.legal import at, bf16, fp16, fp32, in_blocks, int8, int32, int64, make, there, turned


@frozen
class Row:
    """A call that one change makes illegal."""

    call: str
    message: str
    changed: Mapping[str, Any]
    cann: str = field(default="9.1")

    def run(self) -> None:
        """Make the call."""
        make(self.call, self.changed)


def row(call: str, message: str, cann: str = "9.1", **changed: Any) -> Row:
    return Row(call, message, changed, cann)


MERGE: Final = (
    row("update", "lse and local_out must have one length: got 1 and 2", lse=lambda: [there(4, dtype=fp32)]),
    *(
        row(
            "update",
            f"local_out must have 1 to {most} parts in {version}: got {most + 1}",
            cann=cann,
            lse=lambda most=most: [there(4, dtype=fp32)] * (most + 1),
            local_out=lambda most=most: [there(4, 8)] * (most + 1),
        )
        for cann, version, most in (("8.5", "8.5.0", 16), ("9.0", "9.0.0", 16), ("9.1", "9.1.0", 128))
    ),
    row("update", "update_type must be 0 or 1: got 2", update_type=2),
    row("update", r"local_out must be \[rows, head_dim\]: got \[4\]", local_out=lambda: [there(4)] * 2),
    row("update", "local_out must be float16, .*: got torch.int8", local_out=lambda: [there(4, 8, dtype=int8)] * 2),
    row("update", r"head_dim must be a multiple of 8 in 8\.\.512: got 12", local_out=lambda: [there(4, 12)] * 2),
    row("update", r"head_dim must be a multiple of 8 in 8\.\.512: got 520", local_out=lambda: [there(4, 520)] * 2),
    row("update", "lse must be float32: got torch.bfloat16", lse=lambda: [there(4)] * 2),
    row("update", r"lse must be \[4\]: got \[4, 1\]", lse=lambda: [there(4, 1, dtype=fp32)] * 2),
    row("update", "local_out must have one dtype", local_out=lambda: [there(4, 8), there(4, 8, dtype=fp16)]),
    row("update", "local_out must have one shape", local_out=lambda: [there(4, 8), there(4, 16)]),
)

_PLAIN = {"perm_x1": (0, 1, 2)}
PRODUCT: Final = (
    row("product", "bias is not supported", bias=at(128)),
    row("product", "scale and batch_split_factor are not emulated", batch_split_factor=2),
    row("product", r"perm_x1 must be \(0, 1, 2\) or \(1, 0, 2\): got", perm_x1=(0, 2, 1)),
    row("product", r"perm_x2 must be \(0, 1, 2\) or \(0, 2, 1\): got", perm_x2=(1, 0, 2)),
    row("product", r"perm_y must be \(1, 0, 2\): got", perm_y=(0, 1, 2)),
    row("product", r"perm_x2 \(0, 2, 1\) is not supported before 9.1: got 9.0.0", cann="9.0", perm_x2=(0, 2, 1)),
    row("product", r"perm_x1 must be \(1, 0, 2\) where perm_x2 is", perm_x2=(0, 2, 1), **_PLAIN),
    row("product", "dtypes must be equal", weight=at(4, 128, 128, dtype=fp16)),
    row("product", "x and weight must have 3 axes: got 4 and 3", input=at(3, 4, 128, 1)),
    row("product", "K must be that of weight, 128: got 256", input=at(3, 4, 256)),
    row("product", "x and weight must not be empty", input=at(0, 4, 128)),
    row("product", "multiples of 128 in 8.5.0: got 192 and 128", "8.5", input=at(3, 4, 192), weight=at(4, 192, 128)),
    row("product", "multiples of 16 in 9.0.0: got 128 and 24", "9.0", weight=at(4, 128, 24)),
    row("product", "B and N must be below 65536: got 1 and 65536", input=at(1, 1, 1), weight=at(1, 1, 65536)),
    row("product", "K must be below 65536: got 65536", input=at(1, 1, 65536), weight=at(1, 65536, 1), **_PLAIN),
    *(
        row(
            "product",
            rf"K \* B must be below 65536 in {cann}.0: got 512 \* 128",
            cann,
            input=at(1, 128, 512),
            weight=at(128, 512, 128),
        )
        for cann in ("8.5", "9.0")
    ),
)

ROWS: Final = (
    row("rms_norm", "x must be float16, bfloat16 or float32: got torch.int32", input=at(3, 16, dtype=int32)),
    row("rms_norm", "gamma must be torch.bfloat16 or float32: got torch.float16", gamma=at(16, dtype=fp16)),
    row("rms_norm", r"gamma must be \[16\]: got \[8\]", gamma=at(8)),
    row("swiglu", "x must be float16, bfloat16 or float32: got torch.int32", input=at(3, 16, dtype=int32)),
    row("swiglu", "x must not be empty", input=at(0, 16)),
    row("swiglu", "x must be contiguous: got strides", input=turned(3, 16)),
    row("swiglu", "axis .* of x must be even: got 15", input=at(3, 15)),
    row("scatter", "cache_mode: only Norm is emulated: got PA_NZ", cache_mode="PA_NZ"),
    row("scatter", "compression is not emulated", compress_lens=at(2, dtype=int32)),
    row("scatter", "slot_mapping must be int32 or int64: got torch.int16", slot_mapping=at(2, dtype=torch.int16)),
    row("scatter", "slot_mapping must have 1 axis: got 2", slot_mapping=at(2, 1, dtype=int64)),
    row("scatter", r"key must be \[T, heads, D\]: got \[2, 16\]", key=at(2, 16)),
    row("scatter", r"value_cache must be \[blocks, block_size, heads, D\]", value_cache=at(3, 4, 8)),
    row("scatter", "value must have 2 rows: got 3", value=at(3, 1, 8)),
    row("scatter", "key and key_cache must be contiguous", key_cache=turned(3, 4, 1, 16)),
    row("scatter", "key must be float16, bfloat16 or int8: got torch.float32", key=at(2, 1, 16, dtype=fp32)),
    row("scatter", "value_cache must be torch.bfloat16: got .*16", value_cache=at(3, 4, 1, 8, dtype=fp16)),
    row("scatter", r"value_cache must be \[3, 4, 1, 8\]: got \[2, 4, 1, 8\]", value_cache=at(2, 4, 1, 8)),
    row("scatter", "value must have 1 heads: got 2", value=at(2, 2, 8), value_cache=at(3, 4, 2, 8)),
    row(
        "scatter",
        "value must not be int8 beside torch.bfloat16",
        value=at(2, 1, 8, dtype=int8),
        value_cache=at(3, 4, 1, 8, dtype=int8),
    ),
    row(
        "scatter",
        "key_cache must have at least T = 13 rows: got 12",
        key=at(13, 1, 16),
        value=at(13, 1, 8),
        slot_mapping=lambda: torch.full((13,), -1).npu(),
    ),
)

EXPERTS: Final = (
    row("gating", "renorm must be 0: got 1", renorm=1),
    row("gating", "norm_type, group_select_mode: got 2, 0", norm_type=2),
    row("gating", "E must be at most 2048: got 2049", x=at(3, 2049), bias=None),
    row("gating", "group_count must divide E = 16: got 3", group_count=3),
    row("gating", "a group must have more than 2 experts: got 2", group_count=8),
    row(
        "gating",
        "groups padded to 32 must have at most 2048 experts: got 3200",
        x=at(3, 400),
        bias=None,
        group_count=100,
    ),
    row("gating", r"k_group must be in 1\.\.1: got 2", k_group=2),
    row("gating", r"k must be in 1\.\.16: got 17", k=17),
    row("gating_softmax", "k must be at most 1024: got 1025", x=at(3, 1025), k=1025),
    row("routing", "x must be float16, bfloat16, float32 or int8: got torch.int32", x=at(3, 16, dtype=int32)),
    row("routing", "expert_idx must be int32: got torch.int64", expert_idx=at(3, 2, dtype=int64)),
    row("routing", "expert_idx must have 3 rows: got 2", expert_idx=at(2, 2, dtype=int32)),
    row("routing", "expert_num must be above 0: got 0", expert_num=0),
    row("routing", r"active_expert_range must be within 8 experts: got \[4, 9\]", active_expert_range=[4, 9]),
    row(
        "routing",
        "active_expert_range must end at 10240 at most: got 10241",
        expert_num=10241,
        active_expert_range=[10240, 10241],
    ),
    row("routing", "only drop_pad_mode 0 with quant_mode -1 and 1 is emulated", quant_mode=0),
    row("routing", "x must be float16, .* with quant_mode 1", x=at(3, 16, dtype=int8), quant_mode=1),
    row("routing", "scale and offset are not emulated", scale=at(3, dtype=fp32)),
    row("routing", "row_idx_type must be 0 or 1: got 2", row_idx_type=2),
    row("routing", "expert_tokens_num_type: only 0 and 1 are emulated: got 2", expert_tokens_num_type=2),
    row("routing", "active_num must be at least -1: got -2", active_num=-2),
    row("routing", r"active_num must be -1 or T \* K = 6 in 8.5.0: got 0", cann="8.5", active_num=0),
    row("routing", "expert_tokens_num_type must be 1 or 2 in 8.5.0: got 0", cann="8.5", expert_tokens_num_type=0),
    row("routing", "expert_tokens_num_flag must be true in 8.5.0", cann="8.5", expert_tokens_num_flag=False),
    row("routing", "without counts: not emulated", expert_tokens_num_flag=False),
    row("unpermute", "permuted_tokens must be float16, bfloat16 or float32", permuted_tokens=at(6, 16, dtype=int32)),
    row("unpermute", r"sorted_indices must be int32 \[T \* K\]: got torch.int64", sorted_indices=at(6, dtype=int64)),
    row("unpermute", "padded_mode must be false", padded_mode=True),
    row("unpermute", "permuted_tokens must not be empty", permuted_tokens=at(6, 0)),
    row("unpermute", r"probs must be float \[T, K\]: got torch.int32", probs=at(3, 2, dtype=int32)),
    row("unpermute", "probs must have 6 numbers: got 9", probs=at(3, 3)),
    row(
        "unpermute",
        "K must be at most 512: got 513",
        permuted_tokens=at(513, 1),
        sorted_indices=lambda: torch.arange(513, dtype=int32).npu(),
        probs=at(1, 513),
    ),
)

GROUPED: Final = (
    row("grouped", "bias: not emulated", bias=lambda: [there(2, 24)]),
    row("grouped", r"only act_type 0 with group_type -1 or 0 is emulated: got \(1, 0\)", act_type=1),
    row("grouped", "only single tensors are emulated", x=lambda: [there(6, 16)] * 2),
    row(
        "grouped",
        "split_item must be 2 or 3: got 0",
        split_item=0,
        weight=lambda: [there(1, 16, 24)],
        group_list=lambda: torch.tensor([6]).npu(),
    ),
    row("grouped", r"x must be \[M, K\], weight \[E, K, N\]: got 2, 2", weight=lambda: [there(16, 24)]),
    row("grouped", "x must be contiguous, K = 16", x=lambda: [turned(6, 16)()]),
    row("grouped", "weight must be contiguous or transposed", weight=lambda: [turned(2, 16, 24)()]),
    row(
        "grouped",
        "inner axes must be below 65536: got 65536",
        x=lambda: [there(6, 65536)],
        weight=lambda: [there(2, 65536, 1)],
    ),
    row("grouped", "group_list must be int64", group_list=at(2, dtype=int32)),
    row("grouped", r"group_list must be \[2\]: got \[3\]", group_list=at(3, dtype=int64)),
    row(
        "grouped",
        "group_list must have at most 1024 groups: got 1025",
        weight=lambda: [there(1025, 16, 1)],
        group_list=at(1025, dtype=int64),
    ),
    row("grouped", "group_list_type: only 0 and 1 are emulated: got 2", group_list_type=2),
    row(
        "grouped",
        "group_list_type 1 must have more than one group",
        weight=lambda: [there(1, 16, 24)],
        group_list=at(1, dtype=int64),
    ),
    row("grouped", "x and weight must have one dtype", weight=lambda: [there(2, 16, 24, dtype=fp16)]),
    row("grouped", "scale and per_token_scale are for int8", scale=lambda: [there(2, 24)]),
    row("grouped", "out must be torch.bfloat16: got torch.float16", output_dtype=fp16),
    row(
        "grouped",
        "x must be float16, bfloat16, float32 or int8: got torch.int16",
        x=lambda: [there(6, 16, dtype=torch.int16)],
        weight=lambda: [there(2, 16, 24, dtype=torch.int16)],
    ),
    row("grouped_int8", "only int8 with scale and per_token_scale is emulated", per_token_scale=None),
    row("grouped_int8", "scale and per_token_scale are for results that are no sums", output_dtype=int32),
    row("grouped_int8", "out must be float16, bfloat16 or int32 beside int8: got", output_dtype=fp32),
    row("grouped_int8", "scale must be torch.bfloat16 beside torch.bfloat16", scale=lambda: [there(2, 24, dtype=fp32)]),
    row("grouped_int8", r"scale must be \[2, 24\]: got \[24\]", scale=lambda: [there(24)]),
    row("grouped_int8", "per_token_scale must be float32: got", per_token_scale=lambda: [there(6)]),
    row("grouped_int8", r"per_token_scale must be \[6\]", per_token_scale=lambda: [there(5, dtype=fp32)]),
    row(
        "grouped_apart",
        "only group_type 0 is emulated in FRACTAL_NZ: got -1",
        weight=lambda: [in_blocks(16, 16, dtype=bf16)] * 2,
    ),
    row(
        "grouped",
        "only int8 is emulated in FRACTAL_NZ: got torch.bfloat16",
        weight=lambda: [in_blocks(2, 16, 32, dtype=bf16)],
    ),
    row(
        "grouped_fractal",
        "out must be float16 or bfloat16 beside a weight in FRACTAL_NZ",
        output_dtype=int32,
        scale=None,
        per_token_scale=None,
    ),
)

QUANT: Final = (
    row("dynamic_quant", "x must be float16 or bfloat16: got torch.float32", input=at(3, 16, dtype=fp32)),
    row("dynamic_quant", "x must not be empty", input=at(0, 16)),
    row("dynamic_quant", "only plain int8 is emulated", smooth_scales=at(16)),
    row("quant_matmul", "x1 and x2 must be int8", x1=at(3, 16)),
    row("quant_matmul", r"x1 \[M, K\], x2 \[K, N\]", x2=at(8, 24, dtype=int8)),
    row("quant_matmul", "x1 and x2 must not be empty", x1=at(0, 16, dtype=int8), pertoken_scale=at(0, dtype=fp32)),
    row("quant_matmul", "x1 must be contiguous", x1=turned(3, 16, dtype=int8)),
    row("quant_matmul", "x2 must be contiguous or transposed", x2=lambda: there(16, 48, dtype=int8)[:, ::2]),
    row(
        "quant_matmul",
        "the last axes of x1 and x2 must be at most 65535: got 65536",
        x1=at(3, 65536, dtype=int8),
        x2=at(65536, 24, dtype=int8),
    ),
    row("quant_matmul", "transpose flags and groups are not emulated", group_sizes=[1, 1, 32]),
    row("quant_matmul", "y_scale, offset and bias are not emulated", bias=at(24, dtype=int32)),
    row("quant_matmul", "without a scale for each token: not emulated", pertoken_scale=None),
    row("quant_matmul", r"pertoken_scale must be float32 \[3\]", pertoken_scale=at(3)),
    row("quant_matmul", "pertoken_scale is for results that are no sums", output_dtype=int32),
    row("quant_matmul", "out must be float16, bfloat16 or int32", output_dtype=int8),
    row("quant_matmul", "scale beside torch.float16: got torch.bfloat16", output_dtype=fp16, scale=at(24)),
    row("quant_matmul", r"scale must be \[1\] or \[24\]", scale=at(23, dtype=fp32)),
)

_NARROW = {"cos": at(3, 1, 1, 64, dtype=fp16), "sin": at(3, 1, 1, 64, dtype=fp16)}
APART: Final = (
    row("grouped_apart", "split_item must be 0 or 1 for group_type -1: got 3", split_item=3),
    row(
        "grouped_apart",
        "group_list must be left out for group_type -1",
        x=lambda: [there(6, 16)],
        group_list=at(2, dtype=int64),
    ),
    row("grouped_apart", "only products of floats are emulated in group_type -1", scale=lambda: [there(24)] * 2),
    row(
        "grouped_apart",
        r"lists must have one length, 1 to 128: got \(129, 129, 129\)",
        x=lambda: [there(1, 1)] * 129,
        weight=lambda: [there(1, 1)] * 129,
    ),
    row(
        "grouped_apart",
        "x must be float16, bfloat16 or float32: got torch.int8",
        x=lambda: [there(6, 16, dtype=int8)] * 2,
    ),
    row("grouped_apart", "dtypes must be equal: got torch.float16", weight=lambda: [there(16, 24, dtype=fp16)] * 2),
    row("grouped_apart", "only 2 axes are emulated: got 3 and 2", x=lambda: [there(2, 3, 16)] * 2),
    row("grouped_apart", "K must be 16: got 8", weight=lambda: [there(16, 24), there(8, 24)]),
    row("grouped_apart", "x must be contiguous: got strides", x=lambda: [turned(6, 16)()] * 2),
    row(
        "grouped_apart",
        "inner axes must be below 65536",
        x=lambda: [there(1, 65536)] * 2,
        weight=lambda: [there(65536, 1)] * 2,
    ),
    row(
        "grouped_apart",
        "weight must be contiguous, or transposed, all alike",
        weight=lambda: [there(16, 24), there(8, 16).t()],
    ),
)

RESIDUAL: Final = (
    row("add_rms_norm", "x1 must be float16, bfloat16 or float32: got torch.int32", x1=at(3, 16, dtype=int32)),
    row("add_rms_norm", "x2 and gamma must be torch.bfloat16: got torch.float16", x2=at(3, 16, dtype=fp16)),
    row("add_rms_norm", r"x2 must be \[3, 16\]: got \[1, 16\]", x2=at(1, 16)),
    row("add_rms_norm", r"gamma must be \[16\]: got \[8\]", gamma=at(8)),
)

ROTARY: Final = (
    row("rotary", "rotate is not emulated", rotate=at(64, 64)),
    row("rotary", "x must be float16, bfloat16 or float32: got torch.int32", input=at(1, 3, 4, 64, dtype=int32)),
    row("rotary", "x and cos must have 4 axes: got 3 and 4", input=at(3, 4, 64)),
    row("rotary", r"sin must be \[1, 3, 1, 64\]: got \[1, 1, 1, 64\]", r2=at(1, 1, 1, 64)),
    row(
        "rotary",
        "D must be the same everywhere, even and below 896: got 896 and 896",
        input=at(1, 3, 4, 896),
        r1=at(1, 3, 1, 896),
        r2=at(1, 3, 1, 896),
    ),
    row("rotary", r"cos must be 1 or \[1, 2, 4, 64\]: got \[1, 3, 1, 64\]", input=at(1, 2, 4, 64)),
    row(
        "rotary_interleave",
        r"cos of this mode must be broadcast over heads: got \[2, 3, 1, 64\]",
        input=at(2, 3, 4, 64),
        r1=at(2, 3, 1, 64),
        r2=at(2, 3, 1, 64),
    ),
    row("rotary", "B and N must be below 1000: got", input=at(1, 3, 1000, 64)),
    row("rotary_interleave", r"B \* N must be below 1000: got", input=at(1, 3, 1000, 64)),
    row("interleave_rope", "x must be float16 or bfloat16: got torch.float32", x=at(3, 4, 1, 64, dtype=fp32)),
    row("interleave_rope", "cos and sin must be torch.bfloat16: got torch.float16", **_NARROW),
    row("interleave_rope", r"x must be \[B, N, S, 64\]: got \[3, 4, 1, 32\]", x=at(3, 4, 1, 32)),
    row("interleave_rope", r"cos must be .*: got \[1, 1, 1, 64\]", cos=at(1, 1, 1, 64)),
    row("interleave_rope", "x, cos and sin must be contiguous", x=turned(3, 4, 1, 64)),
    row("kv_cache", "scales and offsets are not emulated", c_kv_scale=at(512, dtype=fp32)),
    row("kv_cache", "cache_mode: only PA and PA_BNSD are emulated: got PA_NZ", cache_mode="PA_NZ"),
    row("kv_cache", "kv must be float16 or bfloat16: got torch.float32", kv=at(2, 1, 1, 576, dtype=fp32)),
    row("kv_cache", "cos must be torch.bfloat16: got torch.float32", cos=at(2, 1, 1, 64, dtype=fp32)),
    row("kv_cache", "kv, gamma, .* must be contiguous", ckv_cache=turned(3, 16, 1, 512)),
    row("kv_cache", "index must be int64: got torch.int32", index=at(2, dtype=int32)),
    row("kv_cache", r"gamma must be \[512\]: got \[256\]", gamma=at(256)),
    row(
        "kv_cache",
        "block_size must fill 32 bytes: got 8 of torch.bfloat16",
        k_cache=at(3, 8, 1, 64),
        ckv_cache=at(3, 8, 1, 512),
    ),
)

#: By the module whose refusals they utter.
TABLE: Final[Mapping[str, tuple[Row, ...]]] = {
    "merge": MERGE,
    "product": PRODUCT,
    "rows": ROWS,
    "experts": EXPERTS,
    "grouped": GROUPED,
    "grouped_apart": APART,
    "residual": RESIDUAL,
    "rotary": ROTARY,
    "quant": QUANT,
}
