"""How a checkpoint stores its weights: as numbers, or in 8 bits with what multiplies them out beside them.

    FP8 blocks     w[r, c] = float32(w8[r, c]) * float32(weight_scale_inv[r // 128, c // 128])
    int8 channels  w[r, c] = float32(w8[r, c]) * float32(weight_scale[r])

each product rounded once.  `weight_scale_inv` is a factor in spite of its name; it is float32, bf16, or ue8m0, a power
of two.  Int8 channels come from compressed-tensors (W8A8) and from ModelSlim, whose `quant_model_description.json` says
for each tensor FLOAT, W8A8 or W8A8_DYNAMIC; a tensor that it does not name is FLOAT.

W8A8 of ModelSlim quantises activations by one step that was measured beforehand, W8A8_DYNAMIC by one for each token.
Weights are the same in both, and only they are read: a step of this project quantises activations by token or not at
all.  `quant_bias` undoes `input_offset`, `quant_bias[r] = -input_offset * sum_c w8[r, c]`, and is of no use then; where
it holds anything else, a bias is folded into it, and the checkpoint is refused.
Sources: DeepSeek-V3 (arXiv 2412.19437, section 3.3, and its checkpoints), compressed-tensors, msModelSlim.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen

from mla_fx.effects import InputError
from mla_fx.models.config import ModelConfig
from mla_fx.models.quantize import dequantize_fp8, dequantize_int8, scale_shape

#: Dtypes of weights as they are, as safetensors names them.
FLOATS = ("BF16", "F16", "F32", "F64")
#: What ModelSlim says of the tensors that are read.
FLOAT, STATIC, DYNAMIC = "FLOAT", "W8A8", "W8A8_DYNAMIC"
#: Where ModelSlim says it.
DESCRIPTION = "quant_model_description.json"
#: Elements that are converted at once.
PIECE = 1 << 17
#: Bytes from which on a tensor stays in the mapped file; a mapping keeps what lies around it in memory too.
MAPPED = 1 << 22
#: Rows of a weight that are looked at for a bias.
LOOKED_AT = 64
#: How the names of tensors end that only a format has which is not read.
FOREIGN: Mapping[str, str] = {
    ".qweight": "gptq or awq",
    ".weight_packed": "compressed-tensors pack-quantized",
    ".weight_scale_2": "NVFP4",
    ".weight.absmax": "bitsandbytes",
    ".weight_blocks": "MXFP4",
}


class CheckpointError(InputError):
    """A checkpoint that does not hold what its configuration says."""


@frozen
class Stored:
    """A tensor, or a part of it that begins at `row` and `column`, as it lies in the mapped file."""

    tensor: torch.Tensor
    row: int = 0
    column: int = 0

    def pieces(self, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
        """Some rows after the other in `dtype`, and which rows they are."""
        rows = self.tensor.shape[0]
        step = max(1, PIECE * rows // max(1, self.tensor.numel()))
        for start in range(0, rows, step):
            part = slice(start, min(start + step, rows))
            yield part, self.converted(part, dtype)

    def converted(self, part: slice, dtype: torch.dtype) -> torch.Tensor:
        """Some rows in `dtype`."""
        return self.tensor[part].to(dtype)

    def read(self, dtype: torch.dtype) -> torch.Tensor:
        """All of it in `dtype`, contiguous; what is large and needs no change stays in the mapped file."""
        tensor = self.tensor
        if tensor.dtype == dtype and tensor.is_contiguous() and tensor.nbytes >= MAPPED:
            return tensor
        out = torch.empty(tensor.shape, dtype=dtype)
        for part, piece in self.pieces(dtype):
            out[part] = piece
        return out


@frozen
class Blocks(Stored):
    """FP8 with a factor for each block of 128 x 128 of the whole tensor."""

    scale: torch.Tensor = field(kw_only=True)

    def converted(self, part: slice, dtype: torch.dtype) -> torch.Tensor:
        """Some rows, multiplied out."""
        place = {"row": self.row + part.start, "column": self.column}
        return dequantize_fp8(self.tensor[part], self.scale, dtype=dtype, **place)


@frozen
class Channels(Stored):
    """Int8 with a step for each row of the whole tensor, `scale` [rows] float32."""

    scale: torch.Tensor = field(kw_only=True)

    def converted(self, part: slice, dtype: torch.dtype) -> torch.Tensor:
        """Some rows, multiplied out."""
        return dequantize_int8(self.tensor[part], self.own_scale[part], dtype=dtype)

    @property
    def own_scale(self) -> torch.Tensor:
        """The steps of this part's rows."""
        return self.scale[self.row : self.row + self.tensor.shape[0]]


@frozen
class Beside:
    """A tensor beside an 8-bit weight: which shapes and dtypes it may have."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]


Read = Callable[[str], torch.Tensor]


class Format:
    """A way of storing matrices; this one as they are, those below in 8 bits too."""

    def dtypes(self, name: str) -> tuple[str, ...]:
        """Dtypes that a matrix may have in this checkpoint."""
        return FLOATS

    def beside(self, name: str, shape: tuple[int, ...]) -> dict[str, Beside]:
        """What lies beside a matrix in 8 bits; all of it must be there."""
        return {}

    def stored(self, name: str, part: Stored, read: Read) -> Stored:
        """A part of a matrix in 8 bits with what multiplies it out; `read` gives a whole tensor."""
        return part


class Fp8Blocks(Format):
    """FP8 (e4m3) with `weight_scale_inv` beside it."""

    def dtypes(self, name: str) -> tuple[str, ...]:
        """FP8 too."""
        return (*FLOATS, "F8_E4M3")

    def beside(self, name: str, shape: tuple[int, ...]) -> dict[str, Beside]:
        """A factor for each block."""
        return {f"{name}_scale_inv": Beside((scale_shape(shape),), ("F32", "BF16", "F8_E8M0"))}

    def stored(self, name: str, part: Stored, read: Read) -> Stored:
        """Blocks, their factors in float32."""
        scale = read(f"{name}_scale_inv").to(torch.float32)
        return Blocks(part.tensor, part.row, part.column, scale=scale)


class Int8Channels(Format):
    """Int8 with `weight_scale` beside it, as compressed-tensors writes W8A8."""

    def dtypes(self, name: str) -> tuple[str, ...]:
        """Int8 too."""
        return (*FLOATS, "I8")

    def beside(self, name: str, shape: tuple[int, ...]) -> dict[str, Beside]:
        """A step for each row."""
        return {f"{name}_scale": Beside(((shape[0], 1), (shape[0],)), FLOATS)}

    def stored(self, name: str, part: Stored, read: Read) -> Stored:
        """Channels, their steps in float32."""
        scale = read(f"{name}_scale").to(torch.float32).flatten()
        return Channels(part.tensor, part.row, part.column, scale=scale)


@frozen
class ModelSlim(Int8Channels):
    """Int8 as ModelSlim writes it; `said` is what its description says of the tensors it names."""

    said: Mapping[str, str]

    def dtypes(self, name: str) -> tuple[str, ...]:
        """What the description says."""
        return FLOATS if self.said.get(name, FLOAT) == FLOAT else ("I8",)

    def beside(self, name: str, shape: tuple[int, ...]) -> dict[str, Beside]:
        """A step and an offset for each row; for static activations what quantises them, too."""
        rows = ((shape[0], 1), (shape[0],))
        found = {f"{name}_scale": Beside(rows, FLOATS), f"{name}_offset": Beside(rows, (*FLOATS, "I8", "I32"))}
        if self.said.get(name) == STATIC:
            base = name.removesuffix("weight")
            found[f"{base}input_scale"] = Beside(((1,), ()), FLOATS)
            found[f"{base}input_offset"] = Beside(((1,), ()), (*FLOATS, "I8", "I32"))
            found[f"{base}quant_bias"] = Beside(((shape[0],),), ("I32",))
            found[f"{base}deq_scale"] = Beside(((shape[0],),), ("F32", "I64"))
        return found

    def stored(self, name: str, part: Stored, read: Read) -> Stored:
        """Channels; raises `CheckpointError` where an offset is not zero, or a bias is folded in."""
        if read(f"{name}_offset").count_nonzero():
            raise CheckpointError(f"{name}_offset: only symmetric weights are read: got an offset that is not zero")
        found = super().stored(name, part, read)
        if self.said.get(name) == STATIC and part.row == part.column == 0:
            self._no_bias(name, read)
        return found

    def _no_bias(self, name: str, read: Read) -> None:
        """A bias of a layer is there in all rows; the first ones are looked at."""
        base = name.removesuffix("weight")
        bias, offset = read(f"{base}quant_bias")[:LOOKED_AT].double(), read(f"{base}input_offset").double()
        sums = read(name)[:LOOKED_AT].sum(1, dtype=torch.int64).double()
        # The file's numbers went through float32: a few units of the last place, and one of rounding.
        if ((bias + offset * sums).abs() > 1 + bias.abs() * 2.0**-22).any():
            raise CheckpointError(f"{base}quant_bias: must undo input_offset and nothing else: got a bias folded in")


def format_of(directory: Path, config: ModelConfig) -> Format:
    """How a checkpoint stores its matrices; raises `CheckpointError` with the name of a format that is not read."""
    path = directory / DESCRIPTION
    if path.is_file():
        return ModelSlim({name.removeprefix(config.prefix): kind for name, kind in _description(path).items()})
    if config.storage == "modelslim":
        raise CheckpointError(f"{path}: must be there for weights as ModelSlim stores them: got nothing")
    if config.storage is None:
        return Format()
    if config.storage == "fp8":
        return Fp8Blocks()
    if config.storage == "int8":
        return Int8Channels()
    raise not_read(directory, config.storage)


def not_read(directory: Path, name: str) -> CheckpointError:
    """The error for a format that is not read."""
    return CheckpointError(
        f"{directory}: weights must be bf16, fp16, fp32, FP8 in blocks of 128, or int8 by channel (W8A8 of "
        f"compressed-tensors or ModelSlim): got the format {name}"
    )


def _description(path: Path) -> dict[str, str]:
    """Tensor to kind, as ModelSlim says; raises `CheckpointError` for a kind that is not read."""
    try:
        given: Any = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path}: must be JSON: {error}") from None
    if not isinstance(given, dict):
        raise CheckpointError(f"{path}: must be an object: got {type(given).__name__}")
    for name in ("fa_quant_type", "kv_quant_type", "kv_cache_type", "indexer_quant_type"):
        if given.get(name):
            raise CheckpointError(f"{path}: {name}: attention and caches in 8 bits are not read: got {given[name]!r}")
    # Other entries tell the version of the tool and the kind of most tensors.
    said = {name: kind for name, kind in given.items() if name.endswith("weight") and isinstance(kind, str)}
    for name, kind in said.items():
        if kind not in (FLOAT, STATIC, DYNAMIC):
            raise CheckpointError(f"{path}: {name}: must be {FLOAT}, {STATIC} or {DYNAMIC}: got {kind!r}")
    return said
