"""A checkpoint directory in Hugging Face format: verified as a whole, read in slices.

Opening reads `config.json` and the headers of the safetensors files, and
compares every name, shape and dtype with what the configuration asks for; no
weight is read.  `mla_fx.models.load` then makes parameters of it, one tensor
at a time.  Files are memory-mapped: of a slice only its own pages are read.
What is converted is converted in pieces, so that nothing as large as a tensor
is made on the way.
"""

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from safetensors import SafetensorError, safe_open

from mla_fx.effects import InputError
from mla_fx.models.config import ModelConfig, load_config
from mla_fx.models.quantize import dequantize_fp8, scale_shape
from mla_fx.models.weights import expected, layer_prefix, optional, prediction, prediction_layers
from mla_fx.weights import Weight

#: Dtypes of weights, as safetensors names them.
DTYPES = ("BF16", "F16", "F32", "F64")
#: FP8 weights have a tensor of factors beside them.
FP8, FACTORS = "F8_E4M3", "_scale_inv"
#: Elements that are converted at once.
PIECE = 1 << 17
#: Bytes from which on a tensor stays in the mapped file; a mapping keeps what lies around it in memory too.
MAPPED = 1 << 22
#: How many names of a kind an error lists.
LISTED = 5


#: Rows and columns of a tensor, None for all.
Part = tuple[slice | None, slice | None]


class CheckpointError(InputError):
    """A checkpoint that does not hold what its configuration says."""


@frozen
class Stored:
    """A tensor or a part of it as it lies in the mapped file; of FP8 with the factors of the whole tensor."""

    tensor: torch.Tensor
    scale: torch.Tensor | None
    #: The first row and column within the whole tensor.
    row: int
    column: int

    def pieces(self, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
        """Some rows after the other in `dtype`, and which rows they are; FP8 blocks are multiplied out."""
        rows = self.tensor.shape[0]
        step = max(1, PIECE * rows // max(1, self.tensor.numel()))
        for start in range(0, rows, step):
            part = slice(start, min(start + step, rows))
            if self.scale is None:
                yield part, self.tensor[part].to(dtype)
            else:
                place = {"row": self.row + start, "column": self.column}
                yield part, dequantize_fp8(self.tensor[part], self.scale, dtype=dtype, **place)

    def read(self, dtype: torch.dtype) -> torch.Tensor:
        """All of it in `dtype`, contiguous; what is large and needs no change stays in the mapped file."""
        tensor = self.tensor
        if self.scale is None and tensor.dtype == dtype and tensor.is_contiguous() and tensor.nbytes >= MAPPED:
            return tensor
        out = torch.empty(tensor.shape, dtype=dtype)
        for part, piece in self.pieces(dtype):
            out[part] = piece
        return out


@frozen
class Checkpoint:
    """An opened checkpoint: where each tensor lies.  Raises `CheckpointError`, `InputError`."""

    directory: Path
    config: ModelConfig
    files: Mapping[str, Path]

    @classmethod
    def open(cls, directory: str | Path) -> "Checkpoint":
        """Read configuration and headers, and verify all names, shapes and dtypes at once."""
        directory = Path(directory)
        config = load_config(directory)
        found: dict[str, tuple[int, ...]] = {}
        dtypes: dict[str, str] = {}
        files: dict[str, Path] = {}
        for path in _files(directory):
            for name, (shape, dtype) in _header(path).items():
                if name in files:
                    both = f"{files[name].name} and {path.name}"
                    raise CheckpointError(f"{directory}: {name} must be in one file: got {both}")
                found[name], dtypes[name], files[name] = shape, dtype, path
        known = _verify(directory, config, found, dtypes)
        return cls(directory, config, {name: path for name, path in files.items() if name in known})

    @property
    def has_prediction(self) -> bool:
        """Whether the first prediction layer's tensors are there; transformers leaves them out when it writes."""
        return f"{layer_prefix(self.config.num_hidden_layers)}eh_proj.weight" in self.files

    def read(
        self, name: str, *, dtype: torch.dtype, rows: slice | None = None, columns: slice | None = None
    ) -> torch.Tensor:
        """A tensor or a part of it in `dtype`, contiguous; FP8 blocks are multiplied out.

        Stays in the mapped file where it is large and nothing has to be converted.
        """
        (stored,) = self.stored(name, [(rows, columns)])
        return stored.read(dtype)

    def stored(self, name: str, parts: Sequence[Part]) -> list[Stored]:
        """Parts of a tensor, to be read in pieces; slices are without a step, and counted from the front."""
        scale = None
        if name + FACTORS in self.files:
            with safe_open(self.files[name + FACTORS], "pt") as file:
                scale = file.get_tensor(name + FACTORS)
        with safe_open(self.files[name], "pt") as file:
            return [
                Stored(_part(file, name, part), scale, *(each.start or 0 if each else 0 for each in part))
                for part in parts
            ]


def _part(file: Any, name: str, part: Part) -> torch.Tensor:
    rows, columns = part
    tensor: torch.Tensor
    if rows is None and columns is None:
        tensor = file.get_tensor(name)
    else:
        tensor = file.get_slice(name)[rows or slice(None), columns or slice(None)]
    return tensor


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


def _verify(
    directory: Path, config: ModelConfig, found: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]
) -> Container[str]:
    """Names of every tensor that may be read; tells everything that is wrong at once, raises `CheckpointError`."""
    wanted = expected(config)
    for layer in prediction_layers(config):
        if any(name.startswith(layer_prefix(layer)) for name in found):
            wanted |= prediction(config, layer)
    known = wanted | optional(config)
    scales = {
        name + FACTORS: scale_shape(weight.shape)
        for name, weight in known.items()
        if dtypes.get(name) == FP8 and FP8 in _dtypes(weight, config)
    }
    shapes = {name: weight.shape for name, weight in known.items()} | scales
    allowed = {name: _dtypes(weight, config) for name, weight in known.items()} | dict.fromkeys(scales, ("F32",))
    kinds = (
        ("missing", [name for name in (*wanted, *scales) if name not in found]),
        # A tensor without elements, as transformers writes for networks of width 0, says nothing.
        ("unexpected", [name for name, shape in found.items() if name not in shapes and 0 not in shape]),
        (
            "of another shape",
            [
                f"{name} (must be {list(shape)}, got {list(found[name])})"
                for name, shape in shapes.items()
                if found.get(name, shape) != shape
            ],
        ),
        (
            "of another dtype",
            [
                f"{name} (must be {', '.join(kinds)}, got {dtypes[name]}{_hint(config, dtypes[name])})"
                for name, kinds in allowed.items()
                if name in found and dtypes[name] not in kinds
            ],
        ),
    )
    lines = [f"{len(names)} {kind}: {_some(names)}" for kind, names in kinds if names]
    if lines:
        raise CheckpointError(f"{directory}: tensors must be those of config.json\n  " + "\n  ".join(lines))
    return shapes


def _dtypes(weight: Weight, config: ModelConfig) -> tuple[str, ...]:
    """Dtypes that a tensor is read in; FP8 only for matrices, and only where the configuration says so."""
    return (*DTYPES, FP8) if config.fp8 and len(weight.shape) > 1 else DTYPES


def _hint(config: ModelConfig, dtype: str) -> str:
    return ", and config.json has no quantization_config" if dtype == FP8 and not config.fp8 else ""


def _some(names: Sequence[str]) -> str:
    more = f", and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
