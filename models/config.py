"""A model's configuration, read from a Hugging Face `config.json`.

Field names are those of the file, of DeepSeek-V2, V2-Lite, V3 and V3.1.  Rotary
parameters come in two forms, both read here: `rope_theta` with `rope_scaling`
(as DeepSeek published them) and `rope_parameters` (as transformers writes them
since version 5).  A field that is neither read nor known to change nothing is
an error: it may mean another model.
"""

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import asdict, evolve, field, fields_dict, frozen

from mla_fx.config import MlaConfig, MoeConfig, Yarn
from mla_fx.effects import InputError

MODEL_TYPES: Final = ("deepseek_v2", "deepseek_v3")
#: The largest float64; an integer of a file may be larger.
MAX_FLOAT: Final = sys.float_info.max
#: Side of the square blocks that FP8 weights have a scale for.
FP8_BLOCK: Final = 128
#: Fields of published files that do not change what the model computes.
IGNORED: Final = frozenset(
    """
    _name_or_path architectures attention_dropout auto_map aux_loss_alpha dtype ep_size head_dim initializer_range
    output_attentions output_hidden_states output_router_logits pad_token_id pretraining_tp qk_head_dim return_dict
    router_aux_loss_coef seq_aux torch_dtype transformers_version use_cache
    """.split()  # noqa: SIM905
)


@frozen(kw_only=True)
class ModelConfig:
    """What a model's layers are, and what names and shapes of its checkpoint follow from."""

    model_type: str = "deepseek_v3"
    attention: MlaConfig
    moe: MoeConfig | None = None
    num_hidden_layers: int
    vocab_size: int
    intermediate_size: int
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    num_nextn_predict_layers: int = 0
    tie_word_embeddings: bool = False
    max_position_embeddings: int | None = None
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    #: Projections of the checkpoint are FP8 with a scale for each 128 x 128 block.
    fp8: bool = False
    #: Everything else that the file says, as it says it.
    rest: Mapping[str, Any] = field(factory=dict, eq=False, repr=False)

    def is_moe(self, layer: int) -> bool:
        """Whether a layer has experts in place of one feed-forward network; prediction layers have."""
        if self.moe is None:
            return False
        if layer >= self.num_hidden_layers:
            return True
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    def to_json(self) -> dict[str, Any]:
        """The fields of a `config.json` that gives this configuration again."""
        attention = asdict(self.attention, filter=lambda a, _: a.name not in ("yarn", "rope_theta", "latent_norm_eps"))
        own = asdict(self, filter=lambda a, _: a.name not in ("attention", "moe", "fp8", "rest"))
        moe = asdict(self.moe) if self.moe else {}
        rope: dict[str, Any] = {"rope_theta": self.attention.rope_theta, "rope_type": "default"}
        if self.attention.yarn:
            rope |= {"rope_type": "yarn", **asdict(self.attention.yarn, filter=lambda _, value: value is not None)}
        own["eos_token_id"] = list(self.eos_token_id) or None
        own = {name: value for name, value in own.items() if value is not None}
        own["num_key_value_heads"] = self.attention.num_attention_heads
        if self.fp8:
            own["quantization_config"] = {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            }
        return {**self.rest, **own, **moe, **attention, "rope_parameters": rope}


def small_config() -> ModelConfig:
    """A small model of DeepSeek-V3's form, for tests and demonstrations: 4 layers, 16 heads, 8 experts, YaRN."""
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
        moe=MoeConfig(
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            n_shared_experts=1,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
        ),
        num_hidden_layers=4,
        vocab_size=512,
        intermediate_size=512,
        first_k_dense_replace=1,
        num_nextn_predict_layers=1,
    )


def deepseek_v3_config() -> ModelConfig:
    """DeepSeek-V3, 671B, as published."""
    return ModelConfig(
        attention=MlaConfig.deepseek_v3(),
        moe=MoeConfig(
            n_routed_experts=256,
            num_experts_per_tok=8,
            moe_intermediate_size=2048,
            n_shared_experts=1,
            n_group=8,
            topk_group=4,
            routed_scaling_factor=2.5,
        ),
        num_hidden_layers=61,
        vocab_size=129280,
        intermediate_size=18432,
        first_k_dense_replace=3,
        num_nextn_predict_layers=1,
        max_position_embeddings=163840,
        bos_token_id=0,
        eos_token_id=(1,),
        fp8=True,
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
    read = Reader(given)
    config = ModelConfig(
        model_type=model_type,
        attention=_attention(read, given),
        moe=_moe(read, model_type) if read.count("n_routed_experts", default=None) else None,
        num_hidden_layers=read.count("num_hidden_layers"),
        vocab_size=read.count("vocab_size"),
        intermediate_size=read.count("intermediate_size"),
        first_k_dense_replace=read.count("first_k_dense_replace", default=0, least=0),
        moe_layer_freq=read.count("moe_layer_freq", default=1),
        num_nextn_predict_layers=read.count("num_nextn_predict_layers", default=0, least=0),
        tie_word_embeddings=read.flag("tie_word_embeddings"),
        max_position_embeddings=read.count("max_position_embeddings", default=None),
        bos_token_id=read.count("bos_token_id", default=None, least=0),
        eos_token_id=_end(read, given),
        fp8=_fp8(given),
    )
    unknown = sorted(set(given) - READ - IGNORED)
    if unknown:
        raise InputError(f"{', '.join(unknown)}: not fields of DeepSeek-V2 or V3: got {given[unknown[0]]!r}")
    return evolve(config, rest={name: value for name, value in given.items() if name not in READ})


#: Fields that may have one value only, or that stand for others; `to_json` need not write them again.
CHECKED: Final[Mapping[str, Any]] = {
    "attention_bias": False,
    "rope_interleave": True,
    "mlp_bias": False,
    "hidden_act": "silu",
    "rope_theta": None,
    "rope_scaling": None,
    "num_key_value_heads": None,
    "quantization_config": None,
}
#: Every field that is read.
READ: Final = frozenset(
    {*(name for kind in (ModelConfig, MlaConfig, MoeConfig) for name in fields_dict(kind)), "rope_parameters", *CHECKED}
    - {"attention", "moe", "fp8", "rest", "yarn", "latent_norm_eps"}
)
#: Fields of `rope_parameters` or `rope_scaling`.
ROPE: Final = frozenset({*fields_dict(Yarn), "rope_theta", "rope_type", "type", "partial_rotary_factor", "truncate"})


def _unsupported(given: Mapping[str, Any]) -> None:
    """Fields that would change the numbers in a way that is not implemented."""
    for name, only in CHECKED.items():
        if only is not None and given.get(name) not in (None, only):
            raise InputError(f"{name}: only {only!r} is supported: got {given[name]!r}")


def _fp8(given: Mapping[str, Any]) -> bool:
    """Whether weights are FP8 in blocks; any other quantisation is an error."""
    quantization = given.get("quantization_config")
    if not quantization:
        return False
    if not isinstance(quantization, dict):
        raise InputError(f"quantization_config: must be an object: got {quantization!r}")
    must = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}
    for name, only in must.items():
        if quantization.get(name, only if name == "fmt" else None) != only:
            raise InputError(f"quantization_config.{name}: only {only!r} is supported: got {quantization.get(name)!r}")
    return True


def _end(read: "Reader", given: Mapping[str, Any]) -> tuple[int, ...]:
    """Tokens that end a text: none, one, or a list."""
    if isinstance(given.get("eos_token_id"), list):
        return tuple(Reader({"eos_token_id": token}).count("eos_token_id", least=0) for token in given["eos_token_id"])
    token = read.count("eos_token_id", default=None, least=0)
    return () if token is None else (token,)


def _moe(read: "Reader", model_type: str) -> MoeConfig:
    """Experts and gate; each generation has its own gate, and a file that names the other's contradicts itself."""
    v3 = model_type == "deepseek_v3"
    method = read.word("topk_method", default="noaux_tc" if v3 else "greedy")
    scoring = read.word("scoring_func", default="sigmoid" if v3 else "softmax")
    methods = ("noaux_tc",) if v3 else ("greedy", "group_limited_greedy")
    if method not in methods:
        raise InputError(f"topk_method: must be {' or '.join(methods)} in {model_type}: got {method!r}")
    if scoring != ("sigmoid" if v3 else "softmax"):
        raise InputError(f"scoring_func: must be {'sigmoid' if v3 else 'softmax'} in {model_type}: got {scoring!r}")
    normalise = read.flag("norm_topk_prob", default=v3)
    if normalise and not v3:
        # The published V2 code then leaves the scaling factor out, transformers scales and does not normalise.
        raise InputError("norm_topk_prob: only false is supported in deepseek_v2: got True")
    # Only a greedy choice has no groups; in V3 there is no value that all readers take for a missing one.
    grouped = {"default": 1} if method == "greedy" else {}
    return MoeConfig(
        n_routed_experts=read.count("n_routed_experts"),
        num_experts_per_tok=read.count("num_experts_per_tok"),
        moe_intermediate_size=read.count("moe_intermediate_size"),
        n_shared_experts=read.count("n_shared_experts", default=0, least=0),
        n_group=read.count("n_group", **grouped),
        topk_group=read.count("topk_group", **grouped),
        topk_method=method,
        scoring_func=scoring,
        norm_topk_prob=normalise,
        routed_scaling_factor=read.number("routed_scaling_factor", **({} if v3 else {"default": 1.0})),
    )


def _attention(read: "Reader", given: Mapping[str, Any]) -> MlaConfig:
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
    if unknown := sorted(set(scaling) - ROPE):
        raise InputError(f"{name}.{unknown[0]}: not a field of 'default' or 'yarn': got {scaling[unknown[0]]!r}")
    theta = Reader(given).number("rope_theta", default=None)
    inner = Reader(scaling, prefix=f"{name}.").number("rope_theta", default=theta)
    if theta not in (None, inner):
        raise InputError(f"rope_theta: must be {name}.rope_theta, {inner}, where both are given: got {theta}")
    theta = 10000.0 if inner is None else inner
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        got = scaling["partial_rotary_factor"]
        raise InputError(f"{name}.partial_rotary_factor: only 1.0 is supported: got {got!r}")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if scaling.get("type", kind) != kind:
        raise InputError(f"{name}.type: must be rope_type, {kind!r}, where both are given: got {scaling['type']!r}")
    if kind == "default":
        return theta, None
    if kind != "yarn":
        raise InputError(f"{name}: the type must be 'default' or 'yarn': got {kind!r}")
    if scaling.get("truncate", True) is not True:
        raise InputError(f"{name}.truncate: only True is supported: got {scaling['truncate']!r}")
    read = Reader(scaling, prefix=f"{name}.")
    original = read.count("original_max_position_embeddings")
    stretched = Reader(given).count("max_position_embeddings", default=original) / original
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
class Reader:
    """Fields of an object, checked as they are read.  A null counts as missing."""

    given: Mapping[str, Any]
    prefix: str = ""

    def count(self, name: str, *, default: Any = _REQUIRED, least: int = 1) -> Any:
        """An integer of at least `least`."""
        value = self.present(name, default)
        if value is default:
            return value
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InputError(f"{self.prefix}{name}: must be an integer of at least {least}: got {value!r}")
        return value

    def number(self, name: str, *, default: Any = _REQUIRED, least: float = -math.inf) -> Any:
        """A finite number of at least `least`, as a float."""
        value = self.present(name, default)
        if value is default:
            return value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise InputError(f"{self.prefix}{name}: must be a number: got {value!r}")
        if not least <= value <= MAX_FLOAT or value == -math.inf:
            kind = "a finite number" if least == -math.inf else f"a finite number of at least {least:g}"
            raise InputError(f"{self.prefix}{name}: must be {kind}: got {value!r}")
        return float(value)

    def word(self, name: str, *, default: str) -> str:
        """A string."""
        value = self.present(name, default)
        if not isinstance(value, str):
            raise InputError(f"{self.prefix}{name}: must be a string: got {value!r}")
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        """True or false."""
        value = self.present(name, default)
        if not isinstance(value, bool):
            raise InputError(f"{self.prefix}{name}: must be true or false: got {value!r}")
        return value

    def present(self, name: str, default: Any) -> Any:
        """The value, `default` where it is missing or null; raises `InputError` where there is no default."""
        value = self.given.get(name)
        if value is None and default is _REQUIRED:
            raise InputError(f"{self.prefix}{name}: must be given: got nothing")
        return default if value is None else value
