"""Checkpoints whose projections are random 8-bit numbers with what belongs beside them, and what these are worth.

What a checkpoint of floats holds is replaced, matrix by matrix; the right answers are made here, in float64, from the
definition of each format.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mla_fx import MlaConfig, StepShape
from mla_fx.config import MoeConfig
from mla_fx.models import Checkpoint, ModelConfig, Runner, write_checkpoint
from mla_fx.models.runner import Interpreter, Piece

TINY = ModelConfig(
    attention=MlaConfig(
        hidden_size=160,
        num_attention_heads=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=40,
        qk_rope_head_dim=8,
        v_head_dim=40,
    ),
    moe=MoeConfig(
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, n_shared_experts=1, n_group=2, topk_group=1
    ),
    num_hidden_layers=2,
    vocab_size=32,
    intermediate_size=140,
    first_k_dense_replace=1,
)
O_PROJ = "model.layers.0.self_attn.o_proj.weight"
Tensors = dict[str, torch.Tensor]


def is_projection(name: str) -> bool:
    return name.endswith(("_proj.weight", "kv_a_proj_with_mqa.weight"))


def integers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)


def steps(rows: int, seed: int) -> torch.Tensor:
    """Of very different sizes, so that a wrong one is seen."""
    return 0.01 * torch.exp(torch.randn(rows, generator=torch.Generator().manual_seed(seed)))


def rewritten(
    directory: Path, small: Callable[[str, tuple[int, ...], int], tuple[Tensors, torch.Tensor]]
) -> tuple[Tensors, Tensors]:
    """Each projection replaced by `small(name, shape, seed)`: what is in the file, and what the definition says."""
    tensors, right = load_file(directory / "model.safetensors"), {}
    for seed, (name, tensor) in enumerate(list(tensors.items())):
        if is_projection(name):
            del tensors[name]
            stored, right[name] = small(name, tuple(tensor.shape), seed)
            tensors |= stored
    save_file(tensors, directory / "model.safetensors")
    return tensors, right


def of_channels(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """w[r, c] = w8[r, c] * scale[r], in float64."""
    return weight.double() * scale.double().reshape(-1, 1)


def channels(name: str, shape: tuple[int, ...], seed: int) -> tuple[Tensors, torch.Tensor]:
    weight, scale = integers(shape, seed), steps(shape[0], seed).bfloat16()
    return {name: weight, f"{name}_scale": scale[:, None]}, of_channels(weight, scale)


INPUT_OFFSET = -9


def kind_of(name: str) -> str:
    """As published for DeepSeek: attention static, networks dynamic, and kv_b_proj as it is."""
    if not is_projection(name) or "kv_b_proj" in name:
        return "FLOAT"
    return "W8A8" if "self_attn" in name else "W8A8_DYNAMIC"


def modelslim(name: str, shape: tuple[int, ...], seed: int) -> tuple[Tensors, torch.Tensor]:
    if kind_of(name) == "FLOAT":
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return {name: weight}, weight.double()
    weight, scale = integers(shape, seed), steps(shape[0], seed)
    stored = {name: weight, f"{name}_scale": scale[:, None], f"{name}_offset": torch.zeros(shape[0], 1)}
    if kind_of(name) == "W8A8":
        base = name.removesuffix("weight")
        stored |= {
            f"{base}input_scale": torch.tensor([0.03]),
            f"{base}input_offset": torch.tensor([INPUT_OFFSET], dtype=torch.int8),
            f"{base}quant_bias": (-INPUT_OFFSET * weight.sum(1, dtype=torch.int64)).to(torch.int32),
            f"{base}deq_scale": 0.03 * scale,
        }
    return stored, of_channels(weight, scale)


def described(directory: Path, **changes: str) -> dict[str, Any]:
    """The description that ModelSlim writes; norms are left out, and so FLOAT."""
    names = load_file(directory / "model.safetensors")
    said: dict[str, Any] = {"model_quant_type": "W8A8_DYNAMIC", "version": "1.0.0", "group_size": 0}
    said |= {name: kind_of(name) for name in names if "norm" not in name and "." in name and name.endswith("weight")}
    for name in names:
        if name.endswith(("_scale", "_offset", "_bias")):
            said[name] = "W8A8"
    (directory / "quant_model_description.json").write_text(json.dumps(said | changes))
    return said


def write_modelslim(directory: Path, config: ModelConfig = TINY) -> tuple[Tensors, Tensors]:
    """A checkpoint as ModelSlim writes it: what is in the file, and what the definition says of its projections."""
    write_checkpoint(directory, config)
    found = rewritten(directory, modelslim)
    described(directory)
    return found


def logits(directory: Path, machine: Interpreter, quantization: str | None = None, dtype: str = "fp32") -> torch.Tensor:
    """Of a prompt of five tokens, in float64."""
    shape = StepShape(
        ranks=machine.ranks,
        requests=1,
        blocks=4,
        block_size=16,
        table_width=4,
        dtype=dtype,
        quantization=quantization,
    )
    runner = Runner.load(Checkpoint.open(directory), machine, shape=shape)
    piece = Piece(tokens=[1, 7, 30, 2, 9], start=0, table=[0, 1, 2, 3])
    return runner.forward([[piece]], [range(5)], filling=True)[0][0].double().cpu()
