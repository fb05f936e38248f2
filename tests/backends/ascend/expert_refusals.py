"""What the operators at both ends of the experts are refused for; see `refusals`."""

from collections.abc import Mapping
from typing import Final

from tests.backends.ascend.legal import at, fp16, fp32, in_blocks, int8, int32, int64, there
from tests.backends.ascend.refusals import Row, row

FINALIZE: Final = (
    row(
        "finalize", "expanded_x must be float16, bfloat16 or float32", expanded_permuted_rows=at(1, 6, 16, dtype=int32)
    ),
    row("finalize", "expanded_row_idx must be int32: got torch.int64", expanded_src_to_dst_row=at(6, dtype=int64)),
    row("finalize", "bias and expert_idx are not emulated", export_for_source_row=at(3, 2, dtype=int32)),
    row("finalize", r"drop_pad_mode must be in 0\.\.3: got 4", drop_pad_mode=4),
    row("finalize", "expanded_row_idx must have 1 axis: got 2", expanded_src_to_dst_row=at(3, 2, dtype=int32)),
    row("finalize", "expanded_x must have 3 axes with drop_pad_mode 3: got 2", expanded_permuted_rows=at(6, 16)),
    row("finalize", "expanded_x must have 2 axes with drop_pad_mode 2: got 3", drop_pad_mode=2),
    row("finalize", "scales beside torch.float16: got torch.float32", expanded_permuted_rows=at(1, 6, 16, dtype=fp16)),
    row("finalize", "scales must have 2 axes: got 1", scales=at(3, dtype=fp32)),
    row("finalize", "k must be that of scales, 2: got 3", k=3),
    row("finalize", "K must not be 0", scales=at(3, 0, dtype=fp32)),
    row("finalize", "x1 must be torch.bfloat16: got torch.float32", skip1=at(3, 16, dtype=fp32)),
    row("finalize", r"x1 must be \[3, 16\]: got \[2, 16\]", skip1=at(2, 16)),
    row("finalize", "x2 needs x1", skip2=at(3, 16)),
    row("finalize", r"out must be \[4, 16\]: got \[3, 16\]", expanded_src_to_dst_row=at(8, dtype=int32)),
)

SWIGLU_QUANT: Final = (
    row("swiglu_quant", "only x int32 .* is emulated: got torch.bfloat16", x=at(6, 128)),
    row("swiglu_quant", "bias, quant_scale and quant_offset are not emulated", quant_scale=at(2, 64, dtype=fp32)),
    row("swiglu_quant", "quant_mode: only dynamic is emulated: got static", quant_mode=0),
    row("swiglu_quant", "swiglu_mode: only 0 is emulated: got 2", swiglu_mode=2),
    row("swiglu_quant", r"weight_scale must be \[128\]: got \[2, 128\]", group_index=None),
    row("swiglu_quant", "without weight_scale: not emulated", weight_scale=None),
    row("swiglu_quant", "activation_scale is needed for int32", activation_scale=None),
    row("swiglu_quant", r"group_index must be int64 \[groups\]: got torch.int32", group_index=at(2, dtype=int32)),
    row("swiglu_quant", "weight_scale must be float32: got torch.bfloat16", weight_scale=at(2, 128)),
    row("swiglu_quant", r"weight_scale must be \[2, 128\]: got \[3, 128\]", weight_scale=at(3, 128, dtype=fp32)),
    row("swiglu_quant", "activation_scale must be float32: got torch.bfloat16", activation_scale=at(6)),
    row("swiglu_quant", "activation_scale must have 6 numbers: got 5", activation_scale=at(5, dtype=fp32)),
    row(
        "swiglu_quant",
        "2 H must be a multiple of 64: got 96",
        x=at(6, 96, dtype=int32),
        weight_scale=at(2, 96, dtype=fp32),
    ),
    row(
        "swiglu_quant",
        "2 H must be at most 7232 in groups: got 7296",
        x=at(6, 7296, dtype=int32),
        weight_scale=at(2, 7296, dtype=fp32),
    ),
)

PRODUCT_QUANT: Final = (
    row(
        "product_quant",
        "assist matrix, bias and smooth_scale are not emulated",
        weight_assist_matrix=lambda: [there(2, 64, dtype=fp32)],
    ),
    row("product_quant", r"only dequant_mode, .* 0 are emulated: got \(1, 0, 0\)", dequant_mode=1),
    row("product_quant", "group_list_type must be 0 or 1: got 2", group_list_type=2),
    row("product_quant", "x and weight must be int8: got torch.int32", x=at(6, 16, dtype=int32)),
    row("product_quant", r"x must be \[M, K\], weight \[E, K, N\]: got 3, 3", x=at(1, 6, 16, dtype=int8)),
    row(
        "product_quant",
        "weight must not be transposed",
        weight=lambda: [in_blocks(2, 64, 16).transpose(1, 2)],
    ),
    row("product_quant", "K must be 16: got 32", x=at(6, 32, dtype=int8)),
    row(
        "product_quant",
        "K and N must fill blocks of 16 and 32: got 24 and 64",
        x=at(6, 24, dtype=int8),
        weight=lambda: [in_blocks(2, 24, 64)],
    ),
    row(
        "product_quant",
        "N must be at most 10240, K below 65536: got 10272 and 16",
        weight=lambda: [in_blocks(2, 16, 10272)],
    ),
    row("product_quant", "weight_scale must be of floats: got", weight_scale=lambda: [there(2, 64, dtype=int32)]),
    row("product_quant", r"weight_scale must be \[2, 64\]", weight_scale=lambda: [there(2, 32, dtype=fp32)]),
    row("product_quant", r"x_scale must be float32 \[6\]: got torch.bfloat16", x_scale=at(6)),
    row("product_quant", r"group_list must be int64 \[2\]: got torch.int32", group_list=at(2, dtype=int32)),
)

FRACTAL: Final = (
    row("format_cast", "only casts to FRACTAL_NZ and back are emulated", input=at(32, 64), acl_format=29),
    row(
        "quant_matmul",
        "aclnnQuantMatmulV5: tensors must be in the format ND: got FRACTAL_NZ",
        x1=lambda: in_blocks(3, 16),
    ),
)

#: By the module whose refusals they utter.
TABLE: Final[Mapping[str, tuple[Row, ...]]] = {
    "finalize": FINALIZE,
    "swiglu_quant": (*SWIGLU_QUANT, *PRODUCT_QUANT),
    "fractal": FRACTAL,
}
