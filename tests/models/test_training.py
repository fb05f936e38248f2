"""The script that trained the shipped model: what it writes is what is shipped, and held-out problems stay out."""

import random
import re

import torch

from mla_fx.models import Checkpoint
from mla_fx.models.addition import DIRECTORY, held_out, problems
from mla_fx.models.addition.train import CONFIG, Accuracy, accuracy, sample, shared, train
from mla_fx.models.tokenizer import Tokenizer


def test_a_few_steps_write_a_checkpoint_of_the_shipped_kind(tmp_path):
    train(tmp_path, steps=3, seed=1, batch=16)
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / name).read_text() == (DIRECTORY / name).read_text()
    written, shipped = Checkpoint.open(tmp_path), Checkpoint.open(DIRECTORY)
    assert written.config == shipped.config and written.has_prediction
    name = "model.layers.1.mlp.gate.weight"
    assert not torch.equal(written.read(name, dtype=torch.float32), shipped.read(name, dtype=torch.float32))


def test_steps_learn(tmp_path):
    """From chance to something: the loss goes down and the prediction layer's does not stay behind."""
    train(tmp_path, steps=12, seed=1, batch=64)
    written = Checkpoint.open(tmp_path)
    trained = {name: written.read(name, dtype=torch.float32) for name in written.files}
    chance = 1 / 12
    found = accuracy(trained, CONFIG, problems(200))
    assert isinstance(found, Accuracy) and found.mtp > chance


def test_training_never_sees_what_is_held_out():
    tokenizer = Tokenizer(DIRECTORY)
    seen = set()
    for row in sample(3000, random.Random(0)).tolist():
        a, b, total = map(int, re.fullmatch(r"(\d+)\+(\d+)=(\d+)", tokenizer.decode(row)).groups())
        assert a + b == total and not held_out(a, b)
        seen.add((a, b))
    assert len(seen) > 2500
    assert all(held_out(*map(int, prompt.replace("=", "").split("+"))) for prompt, _ in problems(500, seed=9))


def test_the_shipped_model_is_as_accurate_as_its_page_says():
    """By the oracle's own forward pass, in float32."""
    shipped = Checkpoint.open(DIRECTORY)
    tensors = {name: shipped.read(name, dtype=torch.float32) for name in shipped.files}
    found = accuracy(shared(CONFIG, tensors), CONFIG, problems(2000, seed=5))
    assert found.exact == found.mtp == 1.0 and found.margin > 1
