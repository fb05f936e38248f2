"""The attention part of a layer is that of transformers' model on the same checkpoint.

transformers writes the checkpoint; its own layer then runs in float64 over
whole sequences, ours over shards, several steps, from the files.  transformers
computes rotary angles, norms and softmax in float32 whatever the model's
dtype, so the agreement is that of float32 (`tests/test_absorption.py` holds
the same layer against its definition to 1e-12).
"""

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from mla_fx import Sharding, StepShape, attention_step, backends, orchestrations, plan_batch
from mla_fx.effects import schedule
from mla_fx.models import Checkpoint, Loader
from mla_fx.parameters import empty_cache

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
BASE = {
    "vocab_size": 32,
    "hidden_size": 48,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
}
CASES = {
    "v3": (DeepseekV3Config, {}),
    "v3 without q_lora": (DeepseekV3Config, {"q_lora_rank": None}),
    "v3 yarn": (DeepseekV3Config, {"rope_scaling": YARN}),
    "v3 yarn without q_lora": (DeepseekV3Config, {"rope_scaling": YARN, "q_lora_rank": None}),
    "v3 two mscales": (DeepseekV3Config, {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}}),
    "v3 no mscales": (DeepseekV3Config, {"rope_scaling": {k: v for k, v in YARN.items() if "mscale" not in k}}),
    "v3 other sizes": (
        DeepseekV3Config,
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "v_head_dim": 12,
            "qk_nope_head_dim": 6,
            "rope_theta": 500.0,
        },
    ),
    "v3 yarn with a ramp": (DeepseekV3Config, {"rope_scaling": {**YARN, "original_max_position_embeddings": 4096}}),
    "v3 epsilon": (DeepseekV3Config, {"rms_norm_eps": 1e-3}),
    "v2": (DeepseekV2Config, {}),
    "v2 yarn without q_lora": (DeepseekV2Config, {"rope_scaling": YARN, "q_lora_rank": None}),
}
HISTORY, NEW = (41, 0, 16), (3, 5, 1)  # per request: tokens before the last step, and in it


def transformers_model(case: str, directory):
    kind, changes = CASES[case]
    torch.manual_seed(0)
    config = kind(**{**BASE, **changes}, initializer_range=0.2)
    model = (DeepseekV3ForCausalLM if kind is DeepseekV3Config else DeepseekV2ForCausalLM)(config).eval()
    for name, tensor in model.named_parameters():
        if "norm" in name:  # they start as ones, which would hide a norm that is left out
            torch.nn.init.normal_(tensor, 1.0, 0.2)
    model.save_pretrained(directory)
    return model.double()


def theirs(model, x: torch.Tensor) -> torch.Tensor:
    """transformers' attention of layer 1 over one whole sequence [S, D]."""
    length = x.shape[0]
    embeddings = model.model.rotary_emb(x[None], torch.arange(length)[None])
    mask = torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    return model.model.layers[1].self_attn(x[None], position_embeddings=embeddings, attention_mask=mask)[0][0]


def ours(directory, xs: list[torch.Tensor], *, ranks: int, interleave: int, backend: str, dtype: str) -> torch.Tensor:
    """Our attention of layer 1: the history in chunks, then the new tokens; the last step's rows."""
    checkpoint = Checkpoint.open(directory)
    sharding = Sharding(ranks=ranks, interleave=interleave, block_size=4)
    width = max(sharding.blocks(h + n) for h, n in zip(HISTORY, NEW, strict=True))
    made = backends.get(backend, ranks=ranks)
    shape = StepShape(
        ranks=ranks, tokens=48, requests=3, blocks=3 * width, block_size=4, table_width=width, dtype=dtype
    )
    program = schedule(attention_step(checkpoint.config.attention, shape), orchestrations.attention_aside)
    kind = torch.float64 if dtype == "fp64" else torch.float32
    loaders = [Loader(checkpoint=checkpoint, rank=rank, ranks=ranks, dtype=kind) for rank in range(ranks)]
    run = made.compile(program, made.prepare(program, [loader.attention(1) for loader in loaders]))
    caches = [
        empty_cache(checkpoint.config.attention, blocks=3 * width, block_size=4, dtype=kind)[0] for _ in range(ranks)
    ]
    done = [0, 0, 0]
    for step in (tuple(h // 2 for h in HISTORY), tuple(h - h // 2 for h in HISTORY), NEW):
        batches = plan_batch(
            sharding,
            history=done,
            query=step,
            block_table=[list(range(b * width, (b + 1) * width)) for b in range(3)],
            blocks=3 * width,
            tokens=48,
            requests=3,
            table_width=width,
        )
        rows = torch.cat([x[d : d + n] for x, d, n in zip(xs, done, step, strict=True)])
        hidden = torch.zeros(48, rows.shape[1], dtype=kind)
        hidden[: len(rows)] = rows
        out, caches = run(made.put(caches), [hidden] * ranks, batches)
        done = [d + n for d, n in zip(done, step, strict=True)]
    return out[0][: sum(NEW)].double()


@pytest.mark.parametrize("case", CASES)
def test_layer_agrees(case, tmp_path):
    model = transformers_model(case, tmp_path)
    generator = torch.Generator().manual_seed(1)
    sequences = [
        torch.randn(h + n, 48, generator=generator, dtype=torch.float64) for h, n in zip(HISTORY, NEW, strict=True)
    ]
    with torch.no_grad():
        right = torch.cat([theirs(model, x)[-n:] for x, n in zip(sequences, NEW, strict=True)])
    assert right.std() > 0.05  # something is computed
    for ranks, interleave in ((1, 1), (2, 4), (4, 1)):
        found = ours(tmp_path, sequences, ranks=ranks, interleave=interleave, backend="reference", dtype="fp64")
        torch.testing.assert_close(found, right, rtol=1e-5, atol=2e-6)
    quick = ours(tmp_path, sequences, ranks=2, interleave=2, backend="cpu", dtype="fp32")
    torch.testing.assert_close(quick, right, rtol=1e-4, atol=1e-5)
