"""What the tests of serving serve: a small model with random weights, the trained one, and a stand-in without weights.

What each must say comes from the definition: of the models, the dense forward
beside the trained one; of the stand-in, `Paged.next_token`.
"""

import contextlib
import functools
import json
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import define, evolve, field
from safetensors.torch import load_file

from mla_fx import MlaConfig, MoeConfig, Sharding, StepShape, Yarn, backends
from mla_fx.models import Checkpoint, Engine, ModelConfig, Output, Runner, write_checkpoint
from mla_fx.models.addition.model import forward, mtp_forward
from mla_fx.models.runner import Piece

#: Two layers, one with experts; 8 heads and 8 experts, so that 8 ranks can share them; a prediction module.
SMALL = ModelConfig(
    attention=MlaConfig(
        hidden_size=32,
        num_attention_heads=8,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        yarn=Yarn(factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0),
    ),
    moe=MoeConfig(
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
    ),
    num_hidden_layers=2,
    vocab_size=64,
    intermediate_size=32,
    first_k_dense_replace=1,
    num_nextn_predict_layers=1,
)


@functools.cache
def small(seed: int = 0) -> Path:
    """A checkpoint directory of `SMALL` with random weights, for as long as the process lives."""
    _KEPT.append(tempfile.TemporaryDirectory())
    directory = Path(_KEPT[-1].name) / "model"
    write_checkpoint(directory, SMALL, seed=seed)
    return directory


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def oracle(directory: Path) -> "Oracle":
    """The dense model of a checkpoint directory, in float32."""
    fields = json.loads((directory / "config.json").read_text())
    rope = fields.pop("rope_parameters", None)
    if rope:
        fields |= {"rope_theta": rope["rope_theta"], "rope_scaling": rope}
    tensors = {name: tensor.float() for name, tensor in load_file(directory / "model.safetensors").items()}
    prefix = f"model.layers.{fields['num_hidden_layers']}."
    tensors.setdefault(f"{prefix}embed_tokens.weight", tensors["model.embed_tokens.weight"])
    tensors.setdefault(f"{prefix}shared_head.head.weight", tensors["lm_head.weight"])
    return Oracle(tensors, fields)


@define(eq=False)
class Oracle:
    """The architecture on whole texts: dense causal attention, no cache, no ranks."""

    tensors: dict[str, torch.Tensor]
    fields: dict[str, Any]

    def __call__(self, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [S, V] and hidden states [S, H] of a text."""
        with torch.no_grad():
            logits, hidden = forward(self.tensors, self.fields, torch.tensor([list(tokens)]))
        return logits[0], hidden[0]

    def draft_logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits [S - 1, V] of the prediction module; row i predicts token i + 2."""
        text = torch.tensor([list(tokens)])
        with torch.no_grad():
            _, hidden = forward(self.tensors, self.fields, text)
            return mtp_forward(self.tensors, self.fields, text, hidden)[0]

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The text behind a prompt, one dense forward a token."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self(tokens)[0][-1].argmax()))
        return tokens[len(prompt) :]


def make_runner(
    directory: Path,
    *,
    ranks: int = 1,
    requests: int = 1,
    blocks: int = 64,
    block_size: int = 4,
    table_width: int = 64,
    backend: str = "cpu",
    adversary: int | None = None,
    **options: Any,
) -> Runner:
    shape = StepShape(
        ranks=ranks,
        requests=requests,
        blocks=blocks,
        block_size=block_size,
        table_width=table_width,
        dtype="fp32",
    )
    chosen = backends.get(backend, ranks=ranks, adversary=adversary)
    return Runner.load(Checkpoint.open(directory), chosen, shape=shape, **options)


def run(engine: Engine, most: int = 1000) -> Iterator[Output]:
    """`engine.run()` that gives up: at most `most` steps."""
    for _ in range(most):
        if not engine.busy:
            return
        yield from engine.step()
    raise AssertionError(f"not finished after {most} steps")


def finish(engine: Engine, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Serve prompts to their ends; what is left over must be nothing."""
    requests = [engine.add(prompt, max_new_tokens=count) for prompt in prompts]
    told: dict[int, list[int]] = {request.number: [] for request in requests}
    for output in run(engine):
        told[output.request.number] += output.tokens
    assert all(replica.blocks.available == replica.blocks.blocks for replica in engine.replicas)
    assert all(told[request.number] == request.new_tokens for request in requests)
    return [request.new_tokens for request in requests]


def random_prompts(count: int, *, longest: int = 20, vocabulary: int = 64, seed: int = 0) -> list[list[int]]:
    """Prompts of 1 to `longest` tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, size: int) -> list[int]:
        drawn: list[int] = torch.randint(high, (size,), generator=generator).tolist()
        return drawn

    return [draw(vocabulary, 1 + length) for length in draw(longest, count)]


@define(eq=False)
class Paged:
    """A stand-in for a runner: it keeps tokens in paged memory, and says what follows the text it reads from there.

    What is read must have been written, so an engine that mixes up tables, positions or pieces is found out at once.
    """

    shape: StepShape
    vocabulary: int = 11
    limit: int | None = None
    replicas: int = 1
    chunk: int = 64
    memory: dict[tuple[int, int, int], int] = field(factory=dict)
    steps: list[list[Piece]] = field(factory=list)
    filled: list[bool] = field(factory=list)

    @property
    def config(self) -> ModelConfig:
        return evolve(SMALL, vocab_size=self.vocabulary, max_position_embeddings=self.limit)

    @property
    def sharding(self) -> Sharding:
        return Sharding(ranks=self.shape.ranks, block_size=self.shape.block_size)

    def ready(self, *, drafts: bool, chunk: int) -> None:
        assert chunk >= self.shape.requests

    def decided(self, said: Sequence[Any]) -> list[Any]:
        return list(said)

    def reading(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def forward(
        self, pieces: Sequence[Sequence[Piece]], rows: Sequence[Sequence[int]], *, filling: bool
    ) -> tuple[list[torch.Tensor], Any]:
        """Replica after replica; `steps` has what each of them did."""
        assert len(pieces) == len(rows) == self.replicas
        self.filled.append(filling)
        found = [self._forward(*of_replica) for of_replica in zip(range(self.replicas), pieces, rows, strict=True)]
        return [logits for logits, _ in found], [texts for _, texts in found]

    def _forward(self, replica: int, pieces: Sequence[Piece], rows: Sequence[int]) -> tuple[torch.Tensor, Any]:
        self.steps.append(list(pieces))
        size = self.shape.ranks * self.shape.block_size
        assert bool(pieces) <= len(pieces) <= self.shape.requests
        held = Counter(block for piece in pieces for block in piece.table)
        written = {block for piece in pieces for block in piece.table[piece.start // size :]}
        assert all(held[block] == 1 for block in written)  # what is only read may be shared
        texts: list[list[int]] = []
        for piece in pieces:
            assert piece.tokens
            assert len(piece.table) <= self.shape.table_width
            assert all(0 <= block < self.shape.blocks for block in piece.table)
            for position, token in enumerate(piece.tokens, piece.start):
                self.memory[replica, piece.table[position // size], position % size] = token
            end = piece.start + len(piece.tokens)
            text = [self.memory[replica, piece.table[position // size], position % size] for position in range(end)]
            texts += [text[:last] for last in range(piece.start + 1, end + 1)]
        logits = [self.logits(texts[row]) for row in rows]
        return torch.stack(logits) if logits else torch.empty(0, self.vocabulary), texts

    def logits(self, text: Sequence[int]) -> torch.Tensor:
        """Any numbers that depend on the whole text."""
        generator = torch.Generator().manual_seed(zlib.crc32(bytes(text)))
        return torch.randn(self.vocabulary, generator=generator)

    def next_token(self, text: Sequence[int]) -> int:
        return int(self.logits(text).argmax())

    def greedy(self, prompt: Sequence[int], count: int, end: Sequence[int] = ()) -> list[int]:
        """What plain greedy decoding gives: token after token, up to an end token."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + count:
            tokens.append(self.next_token(tokens))
            if tokens[-1] in end:
                break
        return tokens[len(prompt) :]
