"""A checkpoint directory in Hugging Face format: verified as a whole, read in slices.

Opening reads `config.json` and the headers of the safetensors files, and
compares every name, shape and dtype with what the configuration asks for; no
weight is read.  `mla_fx.models.load` then makes parameters of it, one tensor
at a time.  Files are memory-mapped: of a slice only its own pages are read.
What is converted is converted in pieces, so that nothing as large as a tensor
is made on the way.
"""

import contextlib
import hashlib
import json
import logging
import re
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from safetensors import SafetensorError, safe_open

from mla_fx.models.config import ModelConfig
from mla_fx.models.config_file import load_config
from mla_fx.models.formats import DESCRIPTION, FLOATS, FOREIGN, Beside, Format, Stored, format_of, not_read
from mla_fx.models.formats import CheckpointError as CheckpointError
from mla_fx.models.weights import expected, layer_prefix, optional, prediction, prediction_layers

#: Buffers of older files that follow from the configuration.
BUFFERS = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")
#: Dtypes of matrices that only a quantisation has.
SMALL = ("F8_E4M3", "I8")
#: How many names of a kind an error lists.
LISTED = 5
#: Rows and columns of a tensor, None for all.
Part = tuple[slice | None, slice | None]

_log = logging.getLogger(__name__)


@frozen
class Header:
    """What the file says of a tensor, and which file it is."""

    shape: tuple[int, ...]
    dtype: str
    path: Path


@frozen
class Checkpoint:
    """An opened checkpoint: where each tensor lies.  Raises `CheckpointError`, `InputError`."""

    directory: Path
    config: ModelConfig
    #: Every tensor that is read, by its name without the configuration's prefix.
    files: Mapping[str, Path]
    format: Format
    #: The matrices that are in 8 bits.
    small: Container[str]
    #: What is there and not read, a sentence each.
    notes: tuple[str, ...] = ()
    #: Of all names, shapes, dtypes and files, and the sizes of these: of two that differ, another.  Weights are not
    #: read for it.
    digest: str = ""

    @classmethod
    def open(cls, directory: str | Path) -> "Checkpoint":
        """Read configuration and headers, and verify all names, shapes and dtypes at once."""
        directory = Path(directory)
        config = load_config(directory)
        kind = format_of(directory, config)
        found: dict[str, Header] = {}
        for path in _files(directory):
            for name, header in _headers(path).items():
                if name in found:
                    both = f"{found[name].path.name} and {path.name}"
                    raise CheckpointError(f"{directory}: {name} must be in one file: got {both}")
                found[name] = header
        found, notes = _ours(config, found)
        for note in notes:
            _log.warning("%s: %s", directory, note)
        rules = Rules.of(config, kind, found)
        _verify(directory, rules, found)
        files = {name: header.path for name, header in found.items() if name in rules.of_tensors}
        return cls(directory, config, files, kind, rules.small, notes, _digest(found))

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
        ((stored,),) = self.stored([(name, [(rows, columns)])])
        return stored.read(dtype)

    def stored(self, wanted: Sequence[tuple[str, Sequence[Part]]]) -> list[list[Stored]]:
        """Parts of each tensor, to be read in pieces; slices are without a step, and counted from the front.

        A file is opened once for all of them, which reads its header, and stays mapped as long as one of the parts is.
        """
        with contextlib.ExitStack() as stack:
            opened: dict[Path, Any] = {}

            def part(name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
                path = self.files[name]
                if path not in opened:
                    opened[path] = stack.enter_context(safe_open(path, "pt"))
                full = self.config.prefix + name
                if rows is None and columns is None:
                    tensor = opened[path].get_tensor(full)
                else:
                    tensor = opened[path].get_slice(full)[rows or slice(None), columns or slice(None)]
                assert isinstance(tensor, torch.Tensor)
                return tensor

            found = []
            for name, parts in wanted:
                plain = [Stored(part(name, *each), *(of.start or 0 if of else 0 for of in each)) for each in parts]
                small = name in self.small
                found.append([self.format.stored(name, each, part) for each in plain] if small else plain)
            return found


def _digest(found: Mapping[str, Header]) -> str:
    """See `Checkpoint.digest`."""
    sizes = {header.path: header.path.stat().st_size for header in found.values()}
    lines = [(name, of.shape, of.dtype, of.path.name, sizes[of.path]) for name, of in sorted(found.items())]
    return hashlib.sha256(repr(lines).encode()).hexdigest()[:16]


def _files(directory: Path) -> list[Path]:
    """The safetensors files: one, or those that the index names; ModelSlim gives them a name of its own."""
    quantised = (
        sorted(directory.glob("quant_model_weight*.safetensors*")) if (directory / DESCRIPTION).is_file() else []
    )
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if quantised:
        single = quantised[0]
        index = next((path for path in quantised if path.suffix == ".json"), index)
    if single.is_file() and (not quantised or len(quantised) == 1):
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


def _headers(path: Path) -> dict[str, Header]:
    """Shape and dtype of every tensor in a file."""
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: Header(tuple(part.get_shape()), str(part.get_dtype()), path) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: must be a safetensors file: {error}") from None


def _ours(config: ModelConfig, found: Mapping[str, Header]) -> tuple[dict[str, Header], tuple[str, ...]]:
    """The model's tensors by their own names, and a note for each kind that is not the model's."""
    notes = []
    ours = {name.removeprefix(config.prefix): each for name, each in found.items() if name.startswith(config.prefix)}
    if others := sorted({name.split(".")[0] for name in found if not name.startswith(config.prefix)}):
        notes.append(f"{len(found) - len(ours)} tensors of {', '.join(others)} are not read: they are other parts")
    if buffers := [name for name in ours if name.endswith(BUFFERS)]:
        notes.append(f"{len(buffers)} buffers of rotary_emb are not read: they follow from config.json")
    numbers = (re.fullmatch(r"model\.layers\.(\d+)\.eh_proj\.weight", name) for name in ours)
    # Only what is a prediction layer: another layer behind the last means that the configuration is not this model's.
    more = sorted(layer for each in numbers if each and (layer := int(each[1])) >= config.num_hidden_layers)
    unread = [] if config.num_nextn_predict_layers else [layer_prefix(layer) for layer in more]
    if beyond := [name for name in ours if name.startswith(tuple(unread))]:
        layers = ", ".join(map(str, more))
        notes.append(
            f"{len(beyond)} tensors of prediction layers ({layers}) are not read: config.json has no "
            "num_nextn_predict_layers"
        )
    unwanted = {*buffers, *beyond}
    return {name: each for name, each in ours.items() if name not in unwanted}, tuple(notes)


@frozen
class Rules:
    """What must be there, what shapes and dtypes everything may have, and which matrices are in 8 bits."""

    wanted: tuple[str, ...]
    of_tensors: Mapping[str, Beside]
    small: frozenset[str]

    @classmethod
    def of(cls, config: ModelConfig, kind: Format, found: Mapping[str, Header]) -> "Rules":
        """From the configuration, and from what is found: prediction layers, and what matrices are in 8 bits."""
        wanted = expected(config)
        for layer in prediction_layers(config):
            if any(name.startswith(layer_prefix(layer)) for name in found):
                wanted |= prediction(config, layer)
        rules: dict[str, Beside] = {}
        beside: dict[str, Beside] = {}
        small = set()
        for name, weight in (wanted | optional(config)).items():
            dtypes = kind.dtypes(name) if len(weight.shape) > 1 else FLOATS
            rules[name] = Beside((weight.shape,), dtypes)
            if name in found and found[name].dtype in dtypes and found[name].dtype not in FLOATS:
                small.add(name)
                beside |= kind.beside(name, weight.shape)
        return cls((*wanted, *beside), rules | beside, frozenset(small))


def _verify(directory: Path, rules: Rules, found: Mapping[str, Header]) -> None:
    """Tell everything that is wrong at once; raises `CheckpointError`."""
    # A tensor without elements, as transformers writes for networks of width 0, says nothing.
    unexpected = [name for name, header in found.items() if name not in rules.of_tensors and 0 not in header.shape]
    for ending, name in FOREIGN.items():
        if any(each.endswith(ending) for each in unexpected):
            raise not_read(directory, name)
    shapes, dtypes = [], []
    for name, rule in rules.of_tensors.items():
        shape, dtype = (found[name].shape, found[name].dtype) if name in found else (rule.shapes[0], rule.dtypes[0])
        if shape not in rule.shapes:
            wanted = " or ".join(str(list(each)) for each in rule.shapes)
            shapes.append(f"{name} (must be {wanted}, got {list(shape)})")
        if dtype not in rule.dtypes:
            plain = dtype in SMALL and rule.dtypes == FLOATS and name.endswith("proj.weight")
            hint = ", and nothing says that it is stored in 8 bits" if plain else ""
            dtypes.append(f"{name} (must be {', '.join(rule.dtypes)}, got {dtype}{hint})")
    kinds = {
        "missing": [name for name in rules.wanted if name not in found],
        "unexpected": unexpected,
        "of another shape": shapes,
        "of another dtype": dtypes,
    }
    lines = [f"{len(names)} {kind}: {_some(names)}" for kind, names in kinds.items() if names]
    if lines:
        raise CheckpointError(f"{directory}: tensors must be those of config.json\n  " + "\n  ".join(lines))


def _some(names: Sequence[str]) -> str:
    more = f", and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
