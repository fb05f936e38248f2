"""A model's configuration, read from a Hugging Face `config.json`.

Field names are those of the file.  Rotary parameters come in two forms, both
read here: `rope_theta` with `rope_scaling` (as DeepSeek published them) and
`rope_parameters` (as transformers writes them since version 5).
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import asdict, evolve, field, frozen

from mla_fx.config import MlaConfig, Yarn
from mla_fx.effects import InputError

MODEL_TYPES = ("deepseek_v2", "deepseek_v3")


@frozen(kw_only=True)
class ModelConfig:
    """What names and shapes of a checkpoint follow from, and the attention of its layers."""

    model_type: str = "deepseek_v3"
    attention: MlaConfig
    num_hidden_layers: int
    vocab_size: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int | None = None
    n_shared_experts: int | None = None
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    num_nextn_predict_layers: int = 0
    tie_word_embeddings: bool = False
    #: Everything else that the file says, as it says it.
    rest: Mapping[str, Any] = field(factory=dict, eq=False, repr=False)

    def is_moe(self, layer: int) -> bool:
        """Whether a layer has experts in place of one feed-forward network."""
        if not self.n_routed_experts:
            return False
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    def to_json(self) -> dict[str, Any]:
        """The fields of a `config.json` that gives this configuration again."""
        attention = asdict(self.attention, filter=lambda a, _: a.name not in ("yarn", "rope_theta", "latent_norm_eps"))
        own = asdict(self, filter=lambda a, _: a.name not in ("attention", "rest"))
        rope: dict[str, Any] = {"rope_theta": self.attention.rope_theta, "rope_type": "default"}
        if self.attention.yarn:
            rope |= {"rope_type": "yarn", **asdict(self.attention.yarn, filter=lambda _, value: value is not None)}
        return {**self.rest, **own, **attention, "rope_parameters": rope}


def small_config() -> ModelConfig:
    """A small model of DeepSeek-V3's form, for demonstrations: 4 layers, 16 heads, YaRN."""
    attention = MlaConfig(
        hidden_size=256,
        num_attention_heads=16,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        yarn=Yarn(factor=8.0, original_max_position_embeddings=256),
    )
    return ModelConfig(
        attention=attention,
        num_hidden_layers=4,
        vocab_size=512,
        intermediate_size=512,
        moe_intermediate_size=64,
        n_routed_experts=4,
        n_shared_experts=1,
        first_k_dense_replace=1,
    )


def load_config(directory: str | Path) -> ModelConfig:
    """Read `config.json` of a checkpoint directory; raises `InputError` naming the file, the field and the value."""
    path = Path(directory) / "config.json"
    try:
        given = json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"{path}: must be a readable file: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: must be JSON: {error}") from None
    try:
        return parse_config(given)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def parse_config(given: Any) -> ModelConfig:
    """The configuration that the fields of a `config.json` give; raises `InputError`."""
    if not isinstance(given, dict):
        raise InputError(f"must be an object: got {type(given).__name__}")
    model_type = given.get("model_type")
    if model_type not in MODEL_TYPES:
        raise InputError(f"model_type: must be one of {', '.join(MODEL_TYPES)}: got {model_type!r}")
    _unsupported(given)
    read = _Reader(given)
    config = ModelConfig(
        model_type=model_type,
        attention=_attention(read, given),
        num_hidden_layers=read.count("num_hidden_layers"),
        vocab_size=read.count("vocab_size"),
        intermediate_size=read.count("intermediate_size"),
        moe_intermediate_size=read.count(
            "moe_intermediate_size", default=_REQUIRED if given.get("n_routed_experts") else 1
        ),
        n_routed_experts=read.count("n_routed_experts", default=None),
        n_shared_experts=read.count("n_shared_experts", default=None),
        first_k_dense_replace=read.count("first_k_dense_replace", default=0, least=0),
        moe_layer_freq=read.count("moe_layer_freq", default=1),
        num_nextn_predict_layers=read.count("num_nextn_predict_layers", default=0, least=0),
        tie_word_embeddings=read.flag("tie_word_embeddings"),
    )
    known = {*config.to_json(), "rope_theta", "rope_scaling"}
    return evolve(config, rest={name: value for name, value in given.items() if name not in known})


def _unsupported(given: Mapping[str, Any]) -> None:
    """Fields that would change the numbers in a way that is not implemented."""
    for name, only in (
        ("attention_bias", False),
        ("rope_interleave", True),
        ("mlp_bias", False),
        ("hidden_act", "silu"),
    ):
        if given.get(name, only) != only:
            raise InputError(f"{name}: only {only!r} is supported: got {given[name]!r}")
    if quantization := given.get("quantization_config"):
        raise InputError(f"quantization_config: quantised weights are not supported yet: got {quantization!r}")


def _attention(read: "_Reader", given: Mapping[str, Any]) -> MlaConfig:
    theta, yarn = _rope(given)
    heads = read.count("num_attention_heads")
    if read.count("num_key_value_heads", default=heads) != heads:
        got = given["num_key_value_heads"]
        raise InputError(f"num_key_value_heads: must equal num_attention_heads, {heads}, in MLA: got {got}")
    return MlaConfig(
        hidden_size=read.count("hidden_size"),
        num_attention_heads=read.count("num_attention_heads"),
        q_lora_rank=read.count("q_lora_rank", default=None),
        kv_lora_rank=read.count("kv_lora_rank"),
        qk_nope_head_dim=read.count("qk_nope_head_dim"),
        qk_rope_head_dim=read.count("qk_rope_head_dim"),
        v_head_dim=read.count("v_head_dim"),
        rope_theta=theta,
        yarn=yarn,
        rms_norm_eps=read.number("rms_norm_eps", default=1e-6),
    )


def _rope(given: Mapping[str, Any]) -> tuple[float, Yarn | None]:
    new, old = given.get("rope_parameters"), given.get("rope_scaling")
    if new and old:
        raise InputError("rope_scaling: must not be given beside rope_parameters: got both")
    name = "rope_parameters" if new else "rope_scaling"
    scaling = new or old or {}
    if not isinstance(scaling, dict):
        raise InputError(f"{name}: must be an object: got {scaling!r}")
    theta = _Reader({**given, **scaling}).number("rope_theta", default=10000.0)
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        got = scaling["partial_rotary_factor"]
        raise InputError(f"{name}.partial_rotary_factor: only 1.0 is supported: got {got!r}")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "yarn":
        raise InputError(f"{name}: the type must be 'default' or 'yarn': got {kind!r}")
    if scaling.get("truncate", True) is not True:
        raise InputError(f"{name}.truncate: only True is supported: got {scaling['truncate']!r}")
    read = _Reader(scaling, prefix=f"{name}.")
    original = read.count("original_max_position_embeddings")
    stretched = _Reader(given).count("max_position_embeddings", default=original) / original
    return theta, Yarn(
        factor=read.number("factor", default=stretched),
        original_max_position_embeddings=original,
        beta_fast=read.number("beta_fast", default=32.0, least=0.0) or 32.0,
        beta_slow=read.number("beta_slow", default=1.0, least=0.0) or 1.0,
        mscale=read.number("mscale", default=0.0, least=0.0),
        mscale_all_dim=read.number("mscale_all_dim", default=0.0, least=0.0),
        attention_factor=None if scaling.get("attention_factor") is None else read.number("attention_factor"),
    )


_REQUIRED: Any = object()


@frozen
class _Reader:
    """Fields of an object, checked as they are read.  A null counts as missing."""

    given: Mapping[str, Any]
    prefix: str = ""

    def count(self, name: str, *, default: Any = _REQUIRED, least: int = 1) -> Any:
        value = self.present(name, default)
        if value is default:
            return value
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InputError(f"{self.prefix}{name}: must be an integer of at least {least}: got {value!r}")
        return value

    def number(self, name: str, *, default: Any = _REQUIRED, least: float = -math.inf) -> float:
        value = self.present(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise InputError(f"{self.prefix}{name}: must be a number: got {value!r}")
        if not math.isfinite(value) or value < least:
            kind = "a finite number" if least == -math.inf else f"a finite number of at least {least:g}"
            raise InputError(f"{self.prefix}{name}: must be {kind}: got {value!r}")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.present(name, False)
        if not isinstance(value, bool):
            raise InputError(f"{self.prefix}{name}: must be true or false: got {value!r}")
        return value

    def present(self, name: str, default: Any) -> Any:
        value = self.given.get(name)
        if value is None and default is _REQUIRED:
            raise InputError(f"{self.prefix}{name}: must be given: got nothing")
        return default if value is None else value
