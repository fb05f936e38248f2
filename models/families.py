"""Which models are read: a value for each family says what its config.json and the names of its tensors mean.

To add a family with the same layers, add a `Family` here; a table of what is read stands in this folder's README.
A file's own fields come first; what it leaves out, or gives as null, is what the family says.
"""

from collections.abc import Mapping
from typing import Any, Final

from attrs import evolve, field, frozen

from mla_fx.effects import InputError


@frozen(kw_only=True)
class Family:
    """How the `config.json` and the tensors of a `model_type` say what a model is.

    `defaults` are fields that a file may leave out; a field of `allowed` must have one of its values.  A family may
    hold a text model beside other parts: `text` is then the field with its configuration, which has a `model_type` of
    its own, and `prefix` what the names of its tensors begin with; tensors without it are not read.
    """

    model_type: str
    defaults: Mapping[str, Any] = field(factory=dict)
    allowed: Mapping[str, tuple[Any, ...]] = field(factory=dict)
    text: str | None = None
    prefix: str = ""


#: Softmax over the experts; groups, where there are any, by their best expert.  Weights are not normalised: the
#: published code would then leave the scaling factor out, transformers scales and does not normalise.
DEEPSEEK_V2: Final = Family(
    model_type="deepseek_v2",
    defaults={
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    allowed={
        "topk_method": ("greedy", "group_limited_greedy"),
        "scoring_func": ("softmax",),
        "norm_topk_prob": (False,),
    },
)

#: A sigmoid for each expert, corrected by a bias; groups by their two best.  Also R1, V3.1, Moonlight.
DEEPSEEK_V3: Final = Family(
    model_type="deepseek_v3",
    defaults={"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True},
    allowed={"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)},
)

#: DeepSeek-V3 with other sizes; some rename it to that.
KIMI_K2: Final = evolve(DEEPSEEK_V3, model_type="kimi_k2")

#: A text model of Kimi-K2's form beside a vision tower.
KIMI_K25: Final = Family(model_type="kimi_k25", text="text_config", prefix="language_model.")

#: DeepSeek-V3 with one group and other defaults; `mlp_layer_types` may say which layers have experts.
GLM4_MOE_LITE: Final = Family(
    model_type="glm4_moe_lite",
    defaults={
        **DEEPSEEK_V3.defaults,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "rms_norm_eps": 1e-5,
    },
    allowed=DEEPSEEK_V3.allowed,
)

FAMILIES: Final[Mapping[str, Family]] = {
    family.model_type: family for family in (DEEPSEEK_V2, DEEPSEEK_V3, KIMI_K2, KIMI_K25, GLM4_MOE_LITE)
}

_INDEXER: Final = "an indexer that chooses the positions a query sees"
_SCALED_QUERIES: Final = "queries that are scaled by their position"
#: Models with latent attention that are something else: what they have that is missing here.
OTHERS: Final[Mapping[str, str]] = {
    "deepseek_v32": _INDEXER,
    "glm_moe_dsa": _INDEXER,
    "glm5_next": f"{_INDEXER}, layers of linear attention and hyper-connections",
    "longcat_flash": "two attentions in each layer with the experts beside them, and experts that hand on their input",
    "kimi_linear": "layers of linear attention, and latent attention without rotation",
    "deepseek_v4": "compressed keys and values with an indexer, and hyper-connections",
    "mistral_large_3": _SCALED_QUERIES,
    "mistral4": _SCALED_QUERIES,
    "mistral_large4": f"{_INDEXER}, layers without rotation and capped logits",
    "minicpm3": "embeddings, residuals and logits that are scaled",
}
#: Architectures whose `model_type` does not tell them from others.
ARCHITECTURES: Final[Mapping[str, str]] = {
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "GlmMoeDsaForCausalLM": "glm_moe_dsa",
    "LongcatFlashForCausalLM": "longcat_flash",
    "KimiLinearForCausalLM": "kimi_linear",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "MistralLarge3ForCausalLM": "mistral_large_3",
}


def family_of(given: Mapping[str, Any]) -> Family:
    """The family that a `config.json` is of; raises `InputError` for any other, with what it has that is missing."""
    model_type, architectures = given.get("model_type"), given.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    text = given.get("text_config")
    inner = text.get("model_type") if isinstance(text, dict) else None
    named = [ARCHITECTURES.get(name) for name in names if isinstance(name, str)]
    other = next((kind for kind in (*named, model_type, inner) if isinstance(kind, str) and kind in OTHERS), None)
    if other is not None:
        raise InputError(f"model_type: {other} has {OTHERS[other]}; that is not implemented")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise InputError(f"model_type: must be one of {', '.join(FAMILIES)}: got {model_type!r}")
    return FAMILIES[model_type]
