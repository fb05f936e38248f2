"""The whole model is transformers' model on the same checkpoint: prompt and decoded positions, in float32.

transformers writes the checkpoint and runs the whole sequence at once; ours
fills the prompt in chunks, then decodes position by position over shards and
paged caches.  Every logit agrees to 1e-4 of the logits' root mean square, and
every position's most likely token is the same, which is what greedy decoding
takes: by induction both generate the same text.  A form has a few decoded
positions in every run, and 64 in long ones.
"""

import itertools
from typing import Any

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from mla_fx import Layout, StepShape, backends
from mla_fx.models import Checkpoint, Runner
from mla_fx.models.runner import Piece
from tests.cases import mostly_soak
from tests.models.test_attention_agreement import BASE, YARN

PROMPT, FEW, DECODED, CHUNK = 37, 12, 64, 16
WIDE = {"num_attention_heads": 8, "num_key_value_heads": 8, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
V2 = {"topk_method": "group_limited_greedy", "routed_scaling_factor": 1.7}
#: Generation, what differs from `BASE` (4 heads, 4 experts in 2 groups, 1 dense layer of 2), ranks, interleave.
CASES: dict[str, tuple[int, dict[str, Any], int | Layout, int]] = {
    "v3": (3, {}, 2, 1),
    "v3, one rank": (3, {"num_hidden_layers": 3}, 1, 1),
    "v3 without q_lora": (3, {"q_lora_rank": None}, 2, 4),
    "v3 yarn": (3, {"rope_scaling": YARN}, 4, 1),
    "v3 yarn without q_lora": (3, {"rope_scaling": YARN, "q_lora_rank": None}, 2, 8),
    "v3 wider, three experts a token": (3, {**WIDE, "num_experts_per_tok": 3}, Layout(tp=8, dcp=4), 1),
    "v3 one group": (3, {"n_group": 1, "topk_group": 1}, 2, 1),
    "v3 without shared experts": (3, {"n_shared_experts": 0}, 2, 1),
    "v3 two shared experts": (3, {"n_shared_experts": 2, "rope_scaling": YARN}, 4, 2),
    "v3 experts only": (3, {"first_k_dense_replace": 0}, 2, 1),
    "v3 dense only": (3, {"first_k_dense_replace": 2}, 2, 1),
    "v3 tied head": (3, {"tie_word_embeddings": True}, 2, 1),
    "v3 weights not normalised": (3, {"norm_topk_prob": False}, 2, 1),
    "v3 shares that are padded": (
        3,
        {"n_routed_experts": 6, "n_group": 3, "topk_group": 2, "intermediate_size": 30, "moe_intermediate_size": 12},
        4,
        1,
    ),
    "v2": (2, V2, 2, 1),
    "v2 greedy, without q_lora": (2, {"topk_method": "greedy", "q_lora_rank": None, "rope_scaling": YARN}, 4, 1),
    "v2 wider, tied head": (
        2,
        {**WIDE, **V2, "tie_word_embeddings": True, "first_k_dense_replace": 0},
        Layout(tp=2, dp=2),
        2,
    ),
}


def transformers_model(case: str, directory: Any) -> Any:
    generation, changes, _, _ = CASES[case]
    return written(generation, changes, directory)


def written(generation: int, changes: dict[str, Any], directory: Any) -> Any:
    """A small model of transformers with random weights, and its checkpoint."""
    torch.manual_seed(3)
    kind, model = (
        (DeepseekV3Config, DeepseekV3ForCausalLM) if generation == 3 else (DeepseekV2Config, DeepseekV2ForCausalLM)
    )
    made = model(kind(**{**BASE, "vocab_size": 101, **changes}, initializer_range=0.2)).eval()
    for name, tensor in [*made.named_parameters(), *made.named_buffers()]:
        if "norm" in name:  # they start as ones, which would hide a norm that is left out
            torch.nn.init.normal_(tensor, 1.0, 0.2)
        if "e_score_correction_bias" in name:  # and these as zeros; large enough to change what is chosen
            torch.nn.init.normal_(tensor, 0.0, 0.3)
    made.save_pretrained(directory)
    return made


def ours(
    directory: Any,
    prompt: list[int],
    ranks: int | Layout,
    interleave: int,
    *,
    backend: str = "cpu",
    decoded: int = DECODED,
) -> tuple[list[int], torch.Tensor]:
    """The sequence that greedy decoding gives, and the logits of all its positions but the last.

    The first replica runs it; others have no requests, and take part.
    """
    shape = StepShape(ranks=ranks, requests=1, blocks=16, block_size=8, table_width=16, dtype="fp32")
    runner = Runner.load(
        Checkpoint.open(directory), backends.get(backend, ranks=ranks), shape=shape, interleave=interleave
    )
    tokens, logits, table = list(prompt), [], list(range(16))
    idle = [[]] * (runner.replicas - 1)
    for start in range(0, PROMPT, CHUNK):
        chunk = tokens[start : start + CHUNK]
        piece = Piece(tokens=chunk, start=start, table=table)
        logits.append(runner.forward([[piece], *idle], [range(len(chunk)), *idle], filling=True)[0][0].cpu())
    for _ in range(decoded):
        tokens.append(int(logits[-1][-1].argmax()))
        piece = Piece(tokens=tokens[-1:], start=len(tokens) - 1, table=table)
        logits.append(runner.forward([[piece], *idle], [[0], *idle], filling=False)[0][0].cpu())
    return tokens, torch.cat(logits)


@pytest.mark.parametrize(
    ("case", "decoded"), mostly_soak(itertools.product(CASES, (FEW, DECODED)), ((case, FEW) for case in CASES))
)
def test_model_agrees(case, decoded, tmp_path):
    model = transformers_model(case, tmp_path)
    prompt = torch.randint(101, (PROMPT,), generator=torch.Generator().manual_seed(4)).tolist()
    agree(model, *ours(tmp_path, prompt, *CASES[case][2:], decoded=decoded))


def agree(model: Any, tokens: list[int], found: torch.Tensor, *, first: int = 0) -> None:
    """Every logit, and every position's most likely token, is transformers', from position `first` on."""
    with torch.no_grad():
        right = model(torch.tensor([tokens])).logits[0, first:]
    assert found.shape == right.shape == (len(tokens) - first, 101)
    assert right.std() > 0.1  # something is computed
    deviation = (found - right).abs().max() / right.square().mean().sqrt()
    assert deviation < 1e-4, f"largest deviation {deviation:.3g}"
    assert torch.equal(found.argmax(1), right.argmax(1))


def test_greedy_text_is_that_of_generate(tmp_path):
    """The induction, once by transformers' own loop."""
    model = transformers_model("v3 yarn", tmp_path)
    prompt = torch.randint(101, (PROMPT,), generator=torch.Generator().manual_seed(4)).tolist()
    tokens, _ = ours(tmp_path, prompt, 2, 1)
    given = torch.tensor([prompt])
    generated = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=DECODED,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert generated[0].tolist() == tokens
