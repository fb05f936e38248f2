"""How a checkpoint's makers generate with it: `generation_config.json`.

Its values are defaults, below what somebody asks for.  Nulls and fields that are not named here are left alone, and a
filter that the file does not name is off, as vLLM reads it; transformers would add a top_k of 50.
"""

from pathlib import Path
from typing import Any

from attrs import Factory, frozen

from mla_fx.effects import InputError
from mla_fx.models.config_file import load_config
from mla_fx.models.files import read_object
from mla_fx.models.request import counted, end_tokens
from mla_fx.models.sampling import FIELDS, Sampling


@frozen(kw_only=True)
class GenerationConfig:
    """Sampling, the tokens that end a text, and the limit, where the file has one."""

    sampling: Sampling = Factory(Sampling)
    eos_token_id: tuple[int, ...] = ()
    max_new_tokens: int | None = None


def load_generation_config(directory: str | Path) -> GenerationConfig:
    """Read a checkpoint directory; end tokens that are not in the file are those of `config.json`.

    Sampling is greedy with `"do_sample": false` and where the file names neither that nor a temperature; where it only
    says that it samples, the temperature is 1.  Raises `InputError` naming file and field.
    """
    path = Path(directory) / "generation_config.json"
    given = {name: value for name, value in read_object(path).items() if value is not None}
    try:
        end = _end(given["eos_token_id"]) if "eos_token_id" in given else None
        limit = counted("max_new_tokens", given["max_new_tokens"], least=1) if "max_new_tokens" in given else None
        sampling = _sampling(given)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return GenerationConfig(
        sampling=sampling,
        eos_token_id=load_config(directory).eos_token_id if end is None else end,
        max_new_tokens=limit,
    )


def _sampling(given: dict[str, Any]) -> Sampling:
    chosen = {name: given[name] for name in FIELDS if name in given and name != "seed"}
    samples = given.get("do_sample", "temperature" in given)
    if not isinstance(samples, bool):
        raise InputError(f"do_sample: must be true or false: got {samples!r}")
    if samples:
        chosen.setdefault("temperature", 1.0)
    else:
        chosen["temperature"] = 0.0
    return Sampling(**chosen)


def _end(given: Any) -> tuple[int, ...]:
    """One token or a list of them."""
    try:
        tokens = given if isinstance(given, list) else [given]
        end_tokens(tokens)
    except InputError:
        raise InputError(f"eos_token_id: must be an integer of at least 0, or a list of them: got {given!r}") from None
    return tuple(tokens)
