"""Checkpoints with seeded weights, in the format that DeepSeek publishes."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from mla_fx.effects import InputError
from mla_fx.models.config import ModelConfig
from mla_fx.models.quantize import quantize_fp8, quantize_int8
from mla_fx.models.weights import expected, prediction, prediction_layers
from mla_fx.weights import seeded

#: What readers of safetensors files look for.
METADATA = {"format": "pt"}


def write_checkpoint(
    directory: str | Path,
    config: ModelConfig,
    *,
    seed: int = 0,
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write a checkpoint with seeded weights in `dtype`: every tensor of the format, in `shards` files.

    Projections have variance 1 / inputs, so that features keep the size of about 1; norms are near 1.  With
    `config.storage` "fp8" or "int8" the layers' projections are, with their factors beside them.
    Raises `InputError` when the directory holds a checkpoint already, and for `shards` that would be empty.
    """
    directory = Path(directory)
    weights = expected(config)
    for layer in prediction_layers(config):
        weights |= prediction(config, layer)
    if not 1 <= shards <= len(weights):
        raise InputError(f"shards: must be in 1..{len(weights)}, the number of tensors: got {shards}")
    for name in ("config.json", "model.safetensors", "model.safetensors.index.json"):
        if (directory / name).exists():
            raise InputError(f"directory: must not hold a checkpoint already: got {directory / name}")
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        tensor = seeded(weight, generator)
        projection = weight.kind in ("projection", "absorbed")
        if config.storage == "fp8" and projection:
            tensors[name], tensors[f"{name}_scale_inv"] = quantize_fp8(tensor)
        elif config.storage == "int8" and projection:
            tensors[name], scale = quantize_int8(tensor)
            tensors[f"{name}_scale"] = scale.unsqueeze(1)
        else:
            tensors[name] = tensor if weight.kind == "bias" else tensor.to(dtype)
    (directory / "config.json").write_text(json.dumps(config.to_json(), indent=2) + "\n")
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata=METADATA)
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for k in range(shards):
        file = f"model-{k + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[k::shards]}
        save_file(part, directory / file, metadata=METADATA)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
