"""A checkpoint directory in Hugging Face format: verified as a whole, read in slices.

Opening reads `config.json` and the headers of the safetensors files, and
compares every name and shape with what the configuration asks for; no weight
is read.  A rank then reads its own heads' rows and columns only.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from attrs import frozen
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from mla_fx.effects import InputError
from mla_fx.models.config import ModelConfig, load_config
from mla_fx.models.tensors import Shapes, expected, optional
from mla_fx.parameters import AttentionParams, LayerParams, QueryLora, QueryPlain, heads_of

#: Dtypes of weights, as safetensors names them.
DTYPES = ("BF16", "F16", "F32", "F64")
#: How many names of a kind an error lists.
LISTED = 5


class CheckpointError(InputError):
    """A checkpoint that does not hold what its configuration says."""


@frozen
class Checkpoint:
    """An opened checkpoint: where each tensor lies.  Raises `CheckpointError`, `InputError`."""

    directory: Path
    config: ModelConfig
    files: Mapping[str, Path]

    @classmethod
    def open(cls, directory: str | Path) -> "Checkpoint":
        """Read configuration and headers, and verify all names and shapes at once."""
        directory = Path(directory)
        config = load_config(directory)
        found: Shapes = {}
        dtypes: dict[str, str] = {}
        files: dict[str, Path] = {}
        for path in _files(directory):
            for name, (shape, dtype) in _header(path).items():
                if name in files:
                    both = f"{files[name].name} and {path.name}"
                    raise CheckpointError(f"{directory}: {name} must be in one file: got {both}")
                found[name], dtypes[name], files[name] = shape, dtype, path
        _verify(directory, config, found, dtypes)
        return cls(directory, config, files)

    def load_layer(
        self, layer: int, *, rank: int, ranks: int, dtype: torch.dtype, replicate_query: bool = False
    ) -> LayerParams[torch.Tensor]:
        """One rank's part of a layer's norm and attention, in `dtype`; other heads' weights are not read."""
        c = self.config.attention
        self._refuse(layer, rank, ranks, dtype)
        own = heads_of(rank, ranks=ranks, heads=c.num_attention_heads)
        asked = slice(0, c.num_attention_heads) if replicate_query else own

        def read(name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
            return self._read(f"model.layers.{layer}.{name}.weight", dtype, rows, columns)

        query_rows = slice(asked.start * c.qk_head_dim, asked.stop * c.qk_head_dim)
        query: QueryLora[torch.Tensor] | QueryPlain[torch.Tensor]
        if c.q_lora_rank is None:
            query = QueryPlain(read("self_attn.q_proj", query_rows))
        else:
            down, norm = read("self_attn.q_a_proj"), read("self_attn.q_a_layernorm")
            query = QueryLora(down, norm, read("self_attn.q_b_proj", query_rows))
        width = c.qk_nope_head_dim + c.v_head_dim
        kv_b = read("self_attn.kv_b_proj", slice(asked.start * width, asked.stop * width))
        kv_b = kv_b.view(asked.stop - asked.start, width, c.kv_lora_rank)
        w_uv = kv_b[own.start - asked.start : own.stop - asked.start, c.qk_nope_head_dim :]
        attention = AttentionParams(
            query=query,
            kv_a_proj=read("self_attn.kv_a_proj_with_mqa"),
            kv_a_layernorm=read("self_attn.kv_a_layernorm"),
            w_uk=kv_b[:, : c.qk_nope_head_dim].contiguous(),
            w_uv=w_uv.transpose(1, 2).contiguous(),
            o_proj=read("self_attn.o_proj", None, slice(own.start * c.v_head_dim, own.stop * c.v_head_dim)),
        )
        return LayerParams(read("input_layernorm"), attention)

    def embed(self, token_ids: Sequence[int], *, dtype: torch.dtype) -> torch.Tensor:
        """Embeddings [len(token_ids), D] of tokens, in `dtype`; reads their rows only."""
        for token in token_ids:
            if not 0 <= token < self.config.vocab_size:
                raise InputError(f"token_ids: each must be in 0..{self.config.vocab_size - 1}: got {token}")
        name = "model.embed_tokens.weight"
        with safe_open(self.files[name], "pt") as file:
            rows = file.get_slice(name)
            known = {token: rows[token : token + 1] for token in dict.fromkeys(token_ids)}
        found = [known[token] for token in token_ids]
        return torch.cat(found).to(dtype) if found else torch.empty(0, self.config.attention.hidden_size, dtype=dtype)

    def _refuse(self, layer: int, rank: int, ranks: int, dtype: torch.dtype) -> None:
        heads = self.config.attention.num_attention_heads
        if not 0 <= layer < self.config.num_hidden_layers:
            raise InputError(f"layer: must be in 0..{self.config.num_hidden_layers - 1}: got {layer}")
        if ranks < 1 or heads % ranks:
            raise InputError(f"ranks: must divide num_attention_heads, {heads}: got {ranks}")
        if not 0 <= rank < ranks:
            raise InputError(f"rank: must be in 0..{ranks - 1}: got {rank}")
        if not dtype.is_floating_point:
            raise InputError(f"dtype: must be floating: got {dtype}")

    def _read(self, name: str, dtype: torch.dtype, rows: slice | None, columns: slice | None) -> torch.Tensor:
        with safe_open(self.files[name], "pt") as file:
            if rows is None and columns is None:
                tensor: torch.Tensor = file.get_tensor(name)
            else:
                tensor = file.get_slice(name)[rows or slice(None), columns or slice(None)]
        return tensor.to(dtype).contiguous()


def _files(directory: Path) -> list[Path]:
    """The safetensors files: one, or those that the index names."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise CheckpointError(f"{directory}: must have model.safetensors or model.safetensors.index.json: got neither")
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        outside = [name for name in names if Path(name).name != name]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: must be JSON with an object weight_map: got {error!r}") from None
    if outside:
        raise CheckpointError(f"{index}: every file of weight_map must lie beside it: got {_some(outside)}")
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise CheckpointError(f"{index}: every file of weight_map must be there: missing {_some(missing)}")
    return [directory / name for name in names]


def _header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every tensor in a file."""
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (tuple(part.get_shape()), str(part.get_dtype())) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: must be a safetensors file: {error}") from None


def _verify(directory: Path, config: ModelConfig, found: Shapes, dtypes: Mapping[str, str]) -> None:
    fp8 = [name for name, dtype in dtypes.items() if dtype.startswith("F8") or name.endswith("weight_scale_inv")]
    if fp8:
        must = f"FP8 weights are not supported yet, they must be {', '.join(DTYPES)}"
        raise CheckpointError(f"{directory}: {must}: got {len(fp8)} FP8 tensors: {_some(fp8)}")
    wanted = expected(config)
    missing = [name for name in wanted if name not in found]
    unexpected = [name for name in found if name not in wanted and not optional(config, name)]
    misshapen = [
        f"{name} (must be {list(shape)}, got {list(found[name])})"
        for name, shape in wanted.items()
        if found.get(name, shape) != shape
    ]
    ill_typed = [
        f"{name} (must be {', '.join(DTYPES)}, got {dtypes[name]})"
        for name in wanted
        if dtypes.get(name, DTYPES[0]) not in DTYPES
    ]
    kinds = (
        ("missing", missing),
        ("unexpected", unexpected),
        ("of another shape", misshapen),
        ("of another dtype", ill_typed),
    )
    lines = [f"{len(names)} {kind}: {_some(names)}" for kind, names in kinds if names]
    if lines:
        raise CheckpointError(f"{directory}: tensors must be those of config.json\n  " + "\n  ".join(lines))


def _some(names: Sequence[str]) -> str:
    more = f", and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def write_checkpoint(directory: str | Path, config: ModelConfig, *, seed: int = 0, shards: int = 1) -> None:
    """Write a checkpoint with seeded float32 weights: every tensor of the format, in `shards` files.

    Projections have variance 1 / inputs, so that features keep the size of about 1; norms are near 1.
    Raises `InputError` when the directory holds a checkpoint already, and for `shards` that would be empty.
    """
    directory = Path(directory)
    count = len(expected(config))
    if not 1 <= shards <= count:
        raise InputError(f"shards: must be in 1..{count}, the number of tensors: got {shards}")
    for name in ("config.json", "model.safetensors", "model.safetensors.index.json"):
        if (directory / name).exists():
            raise InputError(f"directory: must not hold a checkpoint already: got {directory / name}")
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _weight(name, shape, generator) for name, shape in expected(config).items()}
    (directory / "config.json").write_text(json.dumps(config.to_json(), indent=2) + "\n")
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for k in range(shards):
        file = f"model-{k + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[k::shards]}
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1 + 0.1 * noise
    if "embed_tokens" in name or len(shape) == 1:
        return noise
    return noise / math.sqrt(shape[-1])
