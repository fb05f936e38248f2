"""Legal calls of the emulated operators, and what becomes of one where something is changed."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

bf16, fp16, fp32, fp64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
int8, int32, int64 = torch.int8, torch.int32, torch.int64


def there(*shape: int, dtype: torch.dtype = bf16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="npu")


def at(*shape: int, dtype: torch.dtype = bf16) -> Callable[[], torch.Tensor]:
    return lambda: there(*shape, dtype=dtype)


def turned(*shape: int, dtype: torch.dtype = bf16) -> Callable[[], torch.Tensor]:
    """Of that shape, with the first two axes swapped in memory."""
    first, second, *rest = shape
    return lambda: there(second, first, *rest, dtype=dtype).transpose(0, 1)


def in_blocks(*shape: int, dtype: torch.dtype = int8) -> torch.Tensor:
    """In FRACTAL_NZ."""
    torch.npu.config.allow_internal_format = True
    try:
        return torch.ops.npu.npu_format_cast(there(*shape, dtype=dtype), 29)
    finally:
        torch.npu.config.allow_internal_format = False


def _int8_products(weight: torch.Tensor) -> dict[str, Any]:
    experts, inner, features = weight.shape
    return {
        "x": [there(6, inner, dtype=int8)],
        "weight": [weight],
        "scale": [there(experts, features)],
        "per_token_scale": [there(6, dtype=fp32)],
        "group_list": torch.tensor([4, 2]).npu(),
        "split_item": 3,
        "group_type": 0,
        "group_list_type": 1,
        "output_dtype": bf16,
    }


def _attention(packed: bool) -> dict[str, Any]:
    shape = (4, 16) if packed else (2, 16, 1)
    return {
        "query": there(*shape, 512),
        "query_rope": there(*shape, 64),
        "key": there(8, 1, 128, 512),
        "key_rope": there(8, 1, 128, 64),
        "num_heads": 16,
        "num_key_value_heads": 1,
        "input_layout": "TND" if packed else "BNSD",
        "actual_seq_lengths": [2, 4] if packed else None,
        "actual_seq_lengths_kv": [300, 0],
        "block_table": there(2, 4, dtype=int32),
        "block_size": 128,
        "softmax_lse_flag": True,
    }


def _second() -> dict[str, Any]:
    renamed = {
        "num_heads": "num_query_heads",
        "actual_seq_lengths": "actual_seq_qlen",
        "actual_seq_lengths_kv": "actual_seq_kvlen",
        "softmax_lse_flag": "return_softmax_lse",
    }
    return {renamed.get(name, name): value for name, value in _attention(packed=True).items()}


LEGAL: Final[Mapping[str, Callable[[], dict[str, Any]]]] = {
    "fia": lambda: _attention(packed=True),
    "fia_bnsd": lambda: _attention(packed=False),
    "fia_out": lambda: _attention(packed=True) | {"out": there(4, 16, 512), "softmax_lse": there(4, 16, 1, dtype=fp32)},
    "fia_v2": _second,
    "update": lambda: {"lse": [there(4, dtype=fp32)] * 2, "local_out": [there(4, 8)] * 2, "update_type": 0},
    "product": lambda: {"input": there(3, 4, 128), "weight": there(4, 128, 128), "perm_x1": (1, 0, 2)},
    "rms_norm": lambda: {"input": there(3, 16), "gamma": there(16)},
    "swiglu": lambda: {"input": there(3, 16)},
    "scatter": lambda: {
        "key": there(2, 1, 16),
        "value": there(2, 1, 8),
        "key_cache": there(3, 4, 1, 16),
        "value_cache": there(3, 4, 1, 8),
        "slot_mapping": torch.tensor([0, -1]).npu(),
        "cache_mode": "Norm",
    },
    "add_rms_norm": lambda: {"x1": there(3, 16), "x2": there(3, 16), "gamma": there(16)},
    "rotary": lambda: {"input": there(1, 3, 4, 64), "r1": there(1, 3, 1, 64), "r2": there(1, 3, 1, 64)},
    "rotary_interleave": lambda: {
        "input": there(1, 3, 4, 64),
        "r1": there(1, 3, 1, 64),
        "r2": there(1, 3, 1, 64),
        "rotary_mode": "interleave",
    },
    "interleave_rope": lambda: {"x": there(3, 4, 1, 64), "cos": there(3, 1, 1, 64), "sin": there(3, 1, 1, 64)},
    "kv_cache": lambda: {
        "kv": there(2, 1, 1, 576),
        "gamma": there(512),
        "cos": there(2, 1, 1, 64),
        "sin": there(2, 1, 1, 64),
        "index": torch.tensor([0, -1]).npu(),
        "k_cache": there(3, 16, 1, 64),
        "ckv_cache": there(3, 16, 1, 512),
        "cache_mode": "PA",
        "is_output_kv": True,
    },
    "gating": lambda: {"x": there(3, 16), "k": 2, "bias": there(16), "norm_type": 1},
    "gating_softmax": lambda: {"x": there(3, 16), "k": 2},
    "routing": lambda: {
        "x": there(3, 16),
        "expert_idx": there(3, 2, dtype=int32),
        "active_num": 6,
        "expert_num": 8,
        "active_expert_range": [0, 4],
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
    },
    "unpermute": lambda: {
        "permuted_tokens": there(6, 16),
        "sorted_indices": torch.arange(6, dtype=int32).npu(),
        "probs": there(3, 2),
    },
    "finalize": lambda: {
        "expanded_permuted_rows": there(1, 6, 16),
        "skip1": None,
        "skip2": None,
        "bias": None,
        "scales": there(3, 2, dtype=fp32),
        "expanded_src_to_dst_row": torch.tensor([0, -1, 5, 5, 1, 2], dtype=int32).npu(),
        "export_for_source_row": None,
        "drop_pad_mode": 3,
    },
    "swiglu_quant": lambda: {
        "x": there(6, 128, dtype=int32),
        "weight_scale": there(2, 128, dtype=fp32),
        "activation_scale": there(6, dtype=fp32),
        "group_index": torch.tensor([4, 1]).npu(),
        "activate_left": True,
        "quant_mode": 1,
    },
    "grouped": lambda: {
        "x": [there(6, 16)],
        "weight": [there(2, 16, 24)],
        "group_list": torch.tensor([4, 2]).npu(),
        "split_item": 3,
        "group_type": 0,
        "group_list_type": 1,
    },
    "grouped_apart": lambda: {
        "x": [there(6, 16)] * 2,
        "weight": [there(24, 16).t(), there(8, 16).t()],
        "split_item": 0,
        "group_type": -1,
    },
    "grouped_int8": lambda: _int8_products(there(2, 16, 24, dtype=int8)),
    "grouped_fractal": lambda: _int8_products(in_blocks(2, 16, 32)),
    "format_cast": lambda: {"input": in_blocks(32, 64), "acl_format": 2},
    "product_quant": lambda: {
        "x": there(6, 16, dtype=int8),
        "weight": [in_blocks(2, 16, 64)],
        "weight_scale": [there(2, 64, dtype=fp32)],
        "x_scale": there(6, dtype=fp32),
        "group_list": torch.tensor([4, 1]).npu(),
        "group_list_type": 1,
    },
    "dynamic_quant": lambda: {"input": there(3, 16)},
    "quant_matmul_fractal": lambda: LEGAL["quant_matmul"]() | {"x2": in_blocks(16, 24)},
    "quant_matmul": lambda: {
        "x1": there(3, 16, dtype=int8),
        "x2": there(16, 24, dtype=int8),
        "scale": there(24, dtype=fp32),
        "pertoken_scale": there(3, dtype=fp32),
        "output_dtype": bf16,
    },
}


def _attend(given: dict[str, Any]) -> Any:
    query, key = given.pop("query"), given.pop("key")
    value = given.pop("value", key)
    npu = torch.ops.npu
    if "num_query_heads" in given:
        return npu.npu_fused_infer_attention_score_v2(query, key, value, **given)
    if "out" in given:
        results = [given.pop("out"), given.pop("softmax_lse")]
        return npu.npu_fused_infer_attention_score.out(query, key, value, **given, out=results)
    return npu.npu_fused_infer_attention_score(query, key, value, **given)


def _named(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda given: getattr(torch.ops.npu, name)(**given)


CALLS: Final[Mapping[str, Callable[[dict[str, Any]], Any]]] = {
    "fia": _attend,
    "fia_bnsd": _attend,
    "fia_out": _attend,
    "fia_v2": _attend,
    "update": _named("npu_attention_update"),
    "product": _named("npu_transpose_batchmatmul"),
    "rms_norm": _named("npu_rms_norm"),
    "swiglu": _named("npu_swiglu"),
    "scatter": _named("npu_scatter_pa_kv_cache"),
    "add_rms_norm": _named("npu_add_rms_norm"),
    "rotary": _named("npu_rotary_mul"),
    "rotary_interleave": _named("npu_rotary_mul"),
    "interleave_rope": _named("npu_interleave_rope"),
    "kv_cache": _named("npu_kv_rmsnorm_rope_cache_v2"),
    "gating": _named("npu_moe_gating_top_k"),
    "gating_softmax": _named("npu_moe_gating_top_k_softmax"),
    "routing": _named("npu_moe_init_routing_v2"),
    "unpermute": _named("npu_moe_token_unpermute"),
    "grouped": _named("npu_grouped_matmul"),
    "grouped_apart": _named("npu_grouped_matmul"),
    "grouped_int8": _named("npu_grouped_matmul"),
    "grouped_fractal": _named("npu_grouped_matmul"),
    "format_cast": _named("npu_format_cast"),
    "product_quant": _named("npu_grouped_matmul_swiglu_quant_v2"),
    "finalize": _named("npu_moe_finalize_routing"),
    "swiglu_quant": _named("npu_dequant_swiglu_quant"),
    "dynamic_quant": _named("npu_dynamic_quant"),
    "quant_matmul": _named("npu_quant_matmul"),
    "quant_matmul_fractal": _named("npu_quant_matmul"),
}


def make(call: str, changed: Mapping[str, Any]) -> Any:
    """The call with these changes; values that are functions are called, on the device."""
    given = LEGAL[call]() | {name: value() if callable(value) else value for name, value in changed.items()}
    return CALLS[call](given)
