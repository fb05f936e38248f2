"""Train the addition model: from nothing to a checkpoint directory.

    python -m mla_fx.models.addition.train --out DIRECTORY

The architecture is in `model.py`.  Shapes are written as there: B is the
batch, S the sequence.

Source: DeepSeek-V3 (arXiv 2412.19437), sections 2.1.2 (load balance without
an auxiliary loss) and 2.2 (the loss of the MTP layer).
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from tqdm import tqdm

from mla_fx.models.addition import held_out, number, problems
from mla_fx.models.addition.model import Config, Tensors, forward, mtp_forward

SPECIAL: Final = ("<pad>", "<bos>", "<eos>", "<unk>")
#: Vocabulary, in the order of the ids: as in published models, some are kept for later use.
VOCABULARY: Final = (*SPECIAL, *"0123456789+=", *(f"<reserved_{i}>" for i in range(16)))
PAD, BOS, EOS = range(3)
EQUALS: Final = VOCABULARY.index("=")
#: Tokens of the longest sequence: `<bos> 999 + 999 = 1998 <eos>`.
LONGEST: Final = 14

#: The file's fields, as DeepSeek-V3 has them; only the sizes are small.
CONFIG: Final[dict[str, Any]] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": 1024,
    "rope_theta": 100.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "use_cache": True,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}


# Tensors and files


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the checkpoint, without the MTP layer's copies of embedding and head."""
    vocabulary, hidden, layers = config["vocab_size"], config["hidden_size"], config["num_hidden_layers"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers + 1):
        prefix = f"model.layers.{layer}."
        if layer == layers:
            found |= {f"{prefix}{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
            found[f"{prefix}eh_proj.weight"] = (hidden, 2 * hidden)
        found |= {f"{prefix}{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        found |= attention_shapes(config, f"{prefix}self_attn.")
        if layer < config["first_k_dense_replace"]:
            found |= mlp_shapes(f"{prefix}mlp.", hidden, config["intermediate_size"])
            continue
        width, count = config["moe_intermediate_size"], config["n_routed_experts"]
        found[f"{prefix}mlp.gate.weight"] = (count, hidden)
        found[f"{prefix}mlp.gate.e_score_correction_bias"] = (count,)
        for expert in range(count):
            found |= mlp_shapes(f"{prefix}mlp.experts.{expert}.", hidden, width)
        found |= mlp_shapes(f"{prefix}mlp.shared_experts.", hidden, width * config["n_shared_experts"])
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def attention_shapes(config: Config, prefix: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one layer's attention."""
    hidden, heads, nope, rope = (
        config[name] for name in ("hidden_size", "num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim")
    )
    q_rank, kv_rank, v = config["q_lora_rank"], config["kv_lora_rank"], config["v_head_dim"]
    return {
        f"{prefix}q_a_proj.weight": (q_rank, hidden),
        f"{prefix}q_a_layernorm.weight": (q_rank,),
        f"{prefix}q_b_proj.weight": (heads * (nope + rope), q_rank),
        f"{prefix}kv_a_proj_with_mqa.weight": (kv_rank + rope, hidden),
        f"{prefix}kv_a_layernorm.weight": (kv_rank,),
        f"{prefix}kv_b_proj.weight": (heads * (nope + v), kv_rank),
        f"{prefix}o_proj.weight": (hidden, heads * v),
    }


def mlp_shapes(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one gated feed-forward network."""
    wide, narrow = (width, hidden), (hidden, width)
    return {f"{prefix}{name}_proj.weight": s for name, s in (("gate", wide), ("up", wide), ("down", narrow))}


def initial(config: Config, generator: torch.Generator) -> dict[str, Tensor]:
    """Parameters to start from, float32: norms 1, biases 0, the rest normal with deviation (inputs)^-1/2."""
    tensors = {}
    for name, shape in shapes(config).items():
        if name.endswith("bias"):
            tensors[name] = torch.zeros(shape)
        elif len(shape) == 1:
            tensors[name] = torch.ones(shape)
        else:
            tensors[name] = torch.randn(shape, generator=generator) * shape[1] ** -0.5
    return tensors


def shared(config: Config, tensors: Tensors) -> dict[str, Tensor]:
    """All tensors of the checkpoint: the MTP layer shares the embedding and the head of the main model."""
    prefix = f"model.layers.{config['num_hidden_layers']}."
    return {
        **tensors,
        f"{prefix}embed_tokens.weight": tensors["model.embed_tokens.weight"],
        f"{prefix}shared_head.head.weight": tensors["lm_head.weight"],
    }


def write(directory: Path, config: Config, tensors: Tensors) -> None:
    """Write `config.json`, `model.safetensors` and `tokenizer.json`: bfloat16 but for the correction biases."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    stored = {
        name: tensor.detach().to(torch.float32 if name.endswith("bias") else torch.bfloat16, copy=True)
        for name, tensor in shared(config, tensors).items()
    }
    (directory / "model.safetensors").write_bytes(save(stored, metadata={"format": "pt"}))
    tokenizer().save(str(directory / "tokenizer.json"))


def tokenizer() -> Tokenizer:
    """Every digit and sign is a token, white space is none; `<bos>` comes first; decoded tokens are joined."""
    made = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<unk>"))
    made.add_special_tokens([token for token in VOCABULARY if token.startswith("<")])
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s+"), behavior="removed"),
            pre_tokenizers.Split(Regex("[0-9+=]"), behavior="isolated"),
        ]
    )
    made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    made.decoder = decoders.Fuse()
    return made


# Problems


def encode(pairs: Iterable[tuple[int, int]]) -> Tensor:
    """Solved problems as tokens int64 [B, 14], padded behind `<eos>`."""
    ids = {token: i for i, token in enumerate(VOCABULARY)}
    rows = [[BOS, *(ids[sign] for sign in f"{a}+{b}={a + b}"), EOS] for a, b in pairs]
    return torch.tensor([row + [PAD] * (LONGEST - len(row)) for row in rows])


def sample(count: int, generator: random.Random) -> Tensor:
    """Problems to learn from, none of them held out: tokens int64 [count, 14].

    Three digits are likelier than in `problems`, for they are harder; and half of the problems have long carries.
    """
    found: list[tuple[int, int]] = []
    while len(found) < count:
        first, second = generator.choices((1, 2, 3), weights=(1, 2, 3), k=2)
        a = number(generator, first)
        b = carrying(a, second, generator) if generator.random() < 0.5 else number(generator, second)
        if not held_out(a, b):
            found.append((a, b))
    return encode(found)


def carrying(a: int, digits: int, generator: random.Random) -> int:
    """A number of at most so many digits; most of them and those of `a` add up to 9, where a carry passes on."""
    places = [int(digit) for digit in f"{a:03}"[-digits:]]
    return int("".join(str(9 - d if generator.random() < 0.7 else generator.randrange(10)) for d in places))


def in_answer(tokens: Tensor) -> Tensor:
    """Which tokens [B, S] belong to the answer, `<eos>` included: bool."""
    equals = tokens == EQUALS
    return (equals.cumsum(dim=1) > 0) & ~equals & (tokens != PAD)


class Accuracy(NamedTuple):
    """What a model does on problems."""

    #: Share of answers that are right to the last token.
    exact: float
    #: Least lead of a right token's logit over the best other one.
    margin: float
    #: Share of answer tokens that the MTP layer predicts, from two tokens ahead.
    mtp: float
    #: The same without the first, for which the MTP layer is not told that the problem ends.
    mtp_later: float


@torch.no_grad()
def accuracy(tensors: Tensors, config: Config, pairs: Iterable[tuple[str, str]]) -> Accuracy:
    """Measure on pairs of prompt and answer, in the tensors' dtype.

    The right answer is given to the model as it goes: greedy decoding gives the same, as long as it is right.
    """
    tokens = encode((int(prompt.split()[0]), int(prompt.split()[2])) for prompt, _ in pairs)
    logits, hidden = forward(tensors, config, tokens[:, :-1])
    target, counts = tokens[:, 1:], in_answer(tokens)[:, 1:]
    right = (logits.argmax(dim=-1) == target) | ~counts
    logits = logits.float()
    others = logits.scatter(-1, target[..., None], -math.inf).amax(dim=-1)
    leads = logits.gather(-1, target[..., None])[..., 0] - others
    ahead = mtp_forward(tensors, config, tokens[:, :-1], hidden).argmax(dim=-1) == target[:, 1:]
    later = counts[:, :-1] & counts[:, 1:]
    return Accuracy(
        exact=right.all(dim=1).double().mean().item(),
        margin=leads[counts].min().item(),
        mtp=ahead[counts[:, 1:]].double().mean().item(),
        mtp_later=ahead[later].double().mean().item(),
    )


# Training


def loss(tensors: Tensors, config: Config, tokens: Tensor, routed: dict[int, Tensor]) -> Tensor:
    """Cross entropy of the answers, of the main model and 0.3 times that of the MTP layer: a scalar."""
    logits, hidden = forward(tensors, config, tokens[:, :-1], routed=routed)
    ahead = mtp_forward(tensors, config, tokens[:, :-1], hidden, routed=routed)
    counts = in_answer(tokens)
    main = F.cross_entropy(logits[counts[:, 1:]], tokens[:, 1:][counts[:, 1:]])
    mtp = F.cross_entropy(ahead[counts[:, 2:]], tokens[:, 2:][counts[:, 2:]])
    return main + 0.3 * mtp


def noisy(tensors: Tensors, deviation: float) -> dict[str, Tensor]:
    """Every weight times 1 + noise: what is learnt under it survives rounding, also in 8 bits."""
    return {
        name: tensor if name.endswith("bias") else tensor * (1 + deviation * torch.randn_like(tensor))
        for name, tensor in tensors.items()
    }


@torch.no_grad()
def balance(tensors: Tensors, routed: Mapping[int, Tensor], real: Tensor, rate: float) -> None:
    """Move each correction bias against the load of its expert, in place (DeepSeek-V3, section 2.1.2).

    `real` [B, S] is true where a token is not padding; `routed` is as `forward` fills it.
    """
    for layer, chosen in routed.items():
        load = chosen[real[:, : chosen.shape[1]]].sum(dim=0).float()
        tensors[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"].add_(rate * (load.mean() - load).sign())


def optimizer_of(tensors: Tensors, rate: float) -> torch.optim.Optimizer:
    """AdamW on all tensors but the correction biases; only matrices decay."""
    learnt = [tensor.requires_grad_() for name, tensor in tensors.items() if not name.endswith("bias")]
    matrices, vectors = ([t for t in learnt if (t.dim() > 1) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True)


def train(directory: Path, *, steps: int, seed: int, batch: int = 256, rate: float = 3e-3) -> None:
    """Train for a number of steps and write the checkpoint, at the end and now and then before."""
    generator = random.Random(seed)
    torch.manual_seed(seed)
    tensors = initial(CONFIG, torch.Generator().manual_seed(seed))
    optimizer = optimizer_of(tensors, rate)
    warm_up = min(300, steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    for step in (bar := tqdm(range(steps), desc="train", mininterval=5)):
        tokens, routed = sample(batch, generator), dict[int, Tensor]()
        deviation = 0.02 * min(2 * step / steps, 1.0)
        value = loss(shared(CONFIG, noisy(tensors, deviation)), CONFIG, tokens, routed)
        optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_([t for t in tensors.values() if t.requires_grad], 1.0)
        optimizer.step()
        schedule.step()
        # The biases come to rest before the weights do.
        balance(tensors, routed, tokens != PAD, rate=1e-3 * max(1 - 1.25 * step / steps, 0.0))
        if (step + 1) % 500 == 0 or step + 1 == steps:
            measured = accuracy(shared(CONFIG, tensors), CONFIG, problems(1000))
            bar.write(f"{step + 1}: loss {value.item():.5f} {measured}")
            write(directory, CONFIG, tensors)


def main() -> None:
    """Train, then measure what was written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--steps", type=int, default=10000, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    train(options.out, steps=options.steps, seed=options.seed)
    print(f"trained in {(time.monotonic() - started) / 60:.0f} minutes")
    stored = load_file(options.out / "model.safetensors")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensors = {name: tensor if name.endswith("bias") else tensor.to(dtype) for name, tensor in stored.items()}
        print(f"{dtype}: {accuracy(tensors, CONFIG, problems(1000))}")


if __name__ == "__main__":
    main()
