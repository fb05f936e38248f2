"""A model's configuration, read from a Hugging Face `config.json`.

Field names are those of the published files; `mla_fx.models.families` says what differs between families.  Rotary
parameters come in two forms, both read here: `rope_theta` with `rope_scaling` (as DeepSeek published them) and
`rope_parameters` (as transformers writes them since version 5).  A null is a missing field.  A field that is neither
read nor known to change nothing is an error: it may mean another model.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import evolve, fields_dict

from mla_fx.config import MlaConfig, MoeConfig, Yarn
from mla_fx.effects import InputError
from mla_fx.models.config import STORAGES, ModelConfig
from mla_fx.models.families import Family, family_of
from mla_fx.models.fields import IGNORED, INHERITED, ONLY, ROPE, Reader


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
    family = family_of(given)
    if family.text is not None:
        inner = given.get(family.text)
        if not isinstance(inner, dict):
            raise InputError(f"{family.text}: must be an object, the text model's fields: got {inner!r}")
        outer = {name: given[name] for name in INHERITED if given.get(name) is not None}
        return evolve(parse_config(outer | inner), prefix=family.prefix)
    given = {**family.defaults, **{name: value for name, value in given.items() if value is not None}}
    _allowed(given, family)
    read = Reader(given)
    layers = read.count("num_hidden_layers")
    storage = _storage(given)
    config = ModelConfig(
        model_type=family.model_type,
        attention=_attention(read, given),
        moe=_moe(read) if read.count("n_routed_experts", default=None) else None,
        num_hidden_layers=layers,
        vocab_size=read.count("vocab_size"),
        intermediate_size=read.count("intermediate_size"),
        first_k_dense_replace=_dense(read, given, layers),
        moe_layer_freq=read.count("moe_layer_freq", default=1),
        num_nextn_predict_layers=read.count("num_nextn_predict_layers", default=0, least=0),
        tie_word_embeddings=read.flag("tie_word_embeddings"),
        max_position_embeddings=read.count("max_position_embeddings", default=None),
        bos_token_id=read.count("bos_token_id", default=None, least=0),
        eos_token_id=_end(read, given),
        storage=storage,
    )
    unknown = sorted(set(given) - READ - IGNORED)
    if unknown:
        raise InputError(f"{', '.join(unknown)}: not fields of {family.model_type}: got {given[unknown[0]]!r}")
    kept = READ if storage in (None, *STORAGES) else READ - {"quantization_config"}
    return evolve(config, rest={name: value for name, value in given.items() if name not in kept})


#: Every field that is read.
READ: Final = frozenset(
    {*(name for kind in (ModelConfig, MlaConfig, MoeConfig) for name in fields_dict(kind)), *ONLY}
    | {"mlp_layer_types", "num_key_value_heads", "quantization_config", "rope_parameters", "rope_scaling", "rope_theta"}
) - {"attention", "moe", "storage", "prefix", "rest", "yarn", "latent_norm_eps"}


def _allowed(given: Mapping[str, Any], family: Family) -> None:
    """Fields that would change the numbers in a way that is not implemented."""
    for name, only in ONLY.items():
        if given.get(name, only) != only:
            raise InputError(f"{name}: only {only!r} is supported: got {given[name]!r}")
    for name, values in family.allowed.items():
        if given.get(name, values[0]) not in values:
            wanted = " or ".join(map(str, values))
            raise InputError(f"{name}: must be {wanted} in {family.model_type}: got {given[name]!r}")


def _storage(given: Mapping[str, Any]) -> str | None:
    """How weights are stored; a format that is not read gives its name, for the checkpoint to refuse."""
    quantization = given.get("quantization_config")
    if not quantization:
        return None
    if not isinstance(quantization, dict):
        raise InputError(f"quantization_config: must be an object: got {quantization!r}")
    method = quantization.get("quant_method")
    if method == "fp8" and quantization.get("weight_block_size") is not None:
        for name in ("fmt", "weight_block_size"):
            only = STORAGES["fp8"][name]
            if quantization.get(name, only) != only:
                raise InputError(f"quantization_config.{name}: only {only!r} is supported: got {quantization[name]!r}")
        return "fp8"
    if method == "compressed-tensors":
        if _channels_by_tokens(quantization):
            return "int8"
        other = " but W8A8 by channel and token" if quantization.get("format") == "int-quantized" else ""
        return f"{method} {quantization.get('format')}" + (f" of anything{other}" if other else "")
    if method in ("ascend", "modelslim"):
        return "modelslim"
    return "fp8 without blocks" if method == "fp8" else str(method)


def _channels_by_tokens(quantization: Mapping[str, Any]) -> bool:
    """Whether all groups of compressed-tensors are W8A8: int8 by output feature, activations by token as they come."""
    if quantization.get("format") != "int-quantized" or quantization.get("kv_cache_scheme"):
        return False
    groups = quantization.get("config_groups")
    (right,) = STORAGES["int8"]["config_groups"].values()
    return (
        isinstance(groups, dict)
        and bool(groups)
        and all(
            isinstance(part := group.get(name) if isinstance(group, dict) else None, dict)
            and all(part.get(key, False if key == "dynamic" else None) == value for key, value in right[name].items())
            for group in groups.values()
            for name in ("weights", "input_activations")
        )
    )


def _dense(read: Reader, given: Mapping[str, Any], layers: int) -> int:
    """How many layers at the front have one network, by number or by a list of the layers' kinds."""
    kinds = given.get("mlp_layer_types")
    if kinds is None:
        count: int = read.count("first_k_dense_replace", default=0, least=0)
        return count
    dense = kinds.index("sparse") if isinstance(kinds, list) and "sparse" in kinds else layers
    if kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise InputError(
            f"mlp_layer_types: must be {layers} layers, those that are 'dense' before those that are 'sparse': "
            f"got {kinds!r}"
        )
    return dense


def _end(read: Reader, given: Mapping[str, Any]) -> tuple[int, ...]:
    """Tokens that end a text: none, one, or a list."""
    if isinstance(given.get("eos_token_id"), list):
        return tuple(Reader({"eos_token_id": token}).count("eos_token_id", least=0) for token in given["eos_token_id"])
    token = read.count("eos_token_id", default=None, least=0)
    return () if token is None else (token,)


def _moe(read: Reader) -> MoeConfig:
    """Experts and gate."""
    method = read.word("topk_method")
    # Only a greedy choice has no groups; elsewhere there is no value that all readers take for a missing one.
    grouped = {"default": 1} if method == "greedy" else {}
    return MoeConfig(
        n_routed_experts=read.count("n_routed_experts"),
        num_experts_per_tok=read.count("num_experts_per_tok"),
        moe_intermediate_size=read.count("moe_intermediate_size"),
        n_shared_experts=read.count("n_shared_experts", default=0, least=0),
        n_group=read.count("n_group", **grouped),
        topk_group=read.count("topk_group", **grouped),
        topk_method=method,
        scoring_func=read.word("scoring_func"),
        norm_topk_prob=read.flag("norm_topk_prob"),
        routed_scaling_factor=read.number("routed_scaling_factor"),
    )


def _attention(read: Reader, given: Mapping[str, Any]) -> MlaConfig:
    theta, yarn = _rope(given)
    heads = read.count("num_attention_heads")
    if read.count("num_key_value_heads", default=heads) != heads:
        got = given["num_key_value_heads"]
        raise InputError(f"num_key_value_heads: must equal num_attention_heads, {heads}, in MLA: got {got}")
    return MlaConfig(
        hidden_size=read.count("hidden_size"),
        num_attention_heads=heads,
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
    """Base of the frequencies and YaRN; both forms may be there where they say the same."""
    forms = {name: given[name] for name in ("rope_parameters", "rope_scaling") if given.get(name)}
    theta = Reader(given).number("rope_theta", default=None)
    for name, scaling in forms.items():
        if not isinstance(scaling, dict):
            raise InputError(f"{name}: must be an object: got {scaling!r}")
        inner = Reader(scaling, prefix=f"{name}.").number("rope_theta", default=theta)
        if theta not in (None, inner):
            raise InputError(f"rope_theta: must be {name}.rope_theta, {inner}, where both are given: got {theta}")
        theta = inner
    found = [_yarn(name, scaling, given) for name, scaling in forms.items()] or [None]
    if found[0] != found[-1]:
        raise InputError(
            f"rope_scaling: must say what rope_parameters says, {forms['rope_parameters']}, where both are given: "
            f"got {forms['rope_scaling']}"
        )
    return 10000.0 if theta is None else theta, found[0]


def _yarn(name: str, scaling: Mapping[str, Any], given: Mapping[str, Any]) -> Yarn | None:
    """Scaling of the frequencies that the object `name` gives, None for none."""
    if unknown := sorted(set(scaling) - ROPE):
        raise InputError(f"{name}.{unknown[0]}: not a field of 'default' or 'yarn': got {scaling[unknown[0]]!r}")
    for field, only in (("partial_rotary_factor", 1.0), ("truncate", True)):
        if scaling.get(field, only) != only:
            raise InputError(f"{name}.{field}: only {only!r} is supported: got {scaling[field]!r}")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if scaling.get("type", kind) != kind:
        raise InputError(f"{name}.type: must be rope_type, {kind!r}, where both are given: got {scaling['type']!r}")
    if kind == "default":
        return None
    if kind != "yarn":
        raise InputError(f"{name}: the type must be 'default' or 'yarn': got {kind!r}")
    read = Reader(scaling, prefix=f"{name}.")
    original = read.count("original_max_position_embeddings")
    stretched = Reader(given).count("max_position_embeddings", default=original) / original
    return Yarn(
        factor=read.number("factor", default=stretched),
        original_max_position_embeddings=original,
        beta_fast=read.number("beta_fast", default=32.0, least=0.0) or 32.0,
        beta_slow=read.number("beta_slow", default=1.0, least=0.0) or 1.0,
        mscale=read.number("mscale", default=0.0, least=0.0),
        mscale_all_dim=read.number("mscale_all_dim", default=0.0, least=0.0),
        attention_factor=read.number("attention_factor", default=None),
    )
