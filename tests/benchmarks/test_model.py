"""A whole model's decode step against transformers', on the same checkpoint with the same history."""

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache
from transformers.utils import logging

from mla_fx import StepShape, backends
from mla_fx.backends.cpu import products
from mla_fx.dtypes import DTYPES
from mla_fx.models import Checkpoint, Runner
from mla_fx.models.addition import DIRECTORY
from mla_fx.models.chunks import round_up
from mla_fx.models.runner import Piece
from tests.benchmarks import apart
from tests.benchmarks.table import TRANSFORMERS, VLLM, Point, agree

BLOCK, CHUNK = 64, 256
#: Of transformers' configuration; 110 million parameters in 3 layers, of which one is dense.
MEDIUM = {
    "vocab_size": 4096,
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 512,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 1 << 16,
}


class Theirs:
    """transformers' model in inference mode, with the keys and values of requests of one length."""

    def __init__(self, directory: Path, dtype: str, prompts: torch.Tensor) -> None:
        logging.set_verbosity_error()  # it has no use for the prediction module, and says so
        logging.disable_progress_bar()
        self.model = DeepseekV3ForCausalLM.from_pretrained(directory, dtype=DTYPES[dtype]).eval()
        self.cache = DynamicCache()
        for part in prompts.split(CHUNK, 1):
            self.forward(part)

    @torch.inference_mode()
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits[:, -1]

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits behind one token more of each request, which is then forgotten."""
        logits = self.forward(tokens)
        self.cache.crop(-1)
        return logits


class Ours:
    """A runner with the latents of the same requests in its caches."""

    def __init__(self, directory: Path, dtype: str, prompts: torch.Tensor) -> None:
        requests, self.length = prompts.shape
        width = self.length // BLOCK + 1
        self.tables = [range(b * width, (b + 1) * width) for b in range(requests)]
        shape = StepShape(requests=requests, blocks=requests * width, block_size=BLOCK, table_width=width, dtype=dtype)
        self.runner = Runner.load(Checkpoint.open(directory), backends.get("cpu"), shape=shape)
        for b, prompt in enumerate(prompts.tolist()):
            for start in range(0, self.length, CHUNK):
                part = prompt[start : start + CHUNK]
                piece = Piece(tokens=part, start=start, table=self.tables[b])
                self.runner.forward([[piece]], [[len(part) - 1]], filling=True)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """The same, over what was written by the step before."""
        pieces = [
            Piece(tokens=new, start=self.length, table=table)
            for new, table in zip(tokens.tolist(), self.tables, strict=True)
        ]
        (logits,), _ = self.runner.forward([pieces], [range(len(pieces))], filling=False)
        assert logits is not None
        return logits


def point(name: str, directory: Path, dtype: str, requests: int, length: int, *, engine: bool = False) -> Point:
    """Decoding one token of each request; the seed makes all see the same tokens.

    `engine`: vLLM's has a column where it is installed, a step with its scheduling and sampling.
    """
    vocabulary = Checkpoint.open(directory).config.vocab_size
    tokens = apart.drawn(vocabulary, requests, length + 1)
    prompts, new = tokens[:, :-1], tokens[:, -1:]
    ours, theirs = (kind(directory, dtype, prompts) for kind in (Ours, Theirs))
    peers = {TRANSFORMERS: partial(theirs.step, new)}
    if engine and VLLM in apart.installed():
        logprobs, first = ours.step(new).float().log_softmax(1).max(1)
        likeliest = [*zip(first.tolist(), logprobs.tolist(), strict=True)]
        peers[VLLM] = apart.engine(directory, dtype, requests, length + 1, likeliest)
    history = f"{round_up(length) // 1024}k" if length >= 1000 else str(length)
    return Point(
        "model",
        f"{name}, {dtype}, decoding, {requests} requests, {history} of history",
        partial(ours.step, new),
        peers,
        dtype=dtype,
        least=dict.fromkeys(peers, 1.0),
    )


def medium(directory: Path) -> Path:
    """A checkpoint of `MEDIUM` with random weights."""
    torch.manual_seed(0)
    routing = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}  # which transformers takes for granted
    DeepseekV3ForCausalLM(DeepseekV3Config(**MEDIUM, **routing)).save_pretrained(directory)
    return directory


def points(whole: bool = False) -> Iterator[Point]:
    for requests in (1, 4):
        yield point("built-in", DIRECTORY, "fp32", requests, 200)
    own = "bf16" if products.has(torch.bfloat16) else "fp32"
    with tempfile.TemporaryDirectory() as directory:
        medium(Path(directory))
        for dtype in ("fp32", "bf16") if whole else (own,):
            for requests in (1, 4):
                for length in (1000, 8000) if whole else (1000,):
                    yield point("medium", Path(directory), dtype, requests, length, engine=True)


def test_both_decode_the_same():
    agree(point("built-in", DIRECTORY, "fp32", 2, 70))
