"""`generation_config.json`: what it says is the default, and what it does not say is left alone."""

import json

import pytest

from mla_fx.effects import InputError
from mla_fx.models import GenerationConfig, Sampling, load_generation_config, small_config
from mla_fx.models.addition import DIRECTORY


@pytest.fixture
def written(tmp_path):
    """A directory with a config.json that ends at 7, and a generation_config.json."""

    def write(content):
        fields = json.loads((DIRECTORY / "config.json").read_text()) | {"eos_token_id": 7}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / "generation_config.json").write_text(text)
        return tmp_path

    return write


CASES = {
    "no file": (None, GenerationConfig(eos_token_id=(7,))),
    "nothing in it": ({}, GenerationConfig(eos_token_id=(7,))),
    "DeepSeek-V3": (
        {
            "_from_model_config": True,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "do_sample": True,
            "temperature": 0.6,
            "top_p": 0.95,
            "transformers_version": "4.39.3",
        },
        GenerationConfig(sampling=Sampling(temperature=0.6, top_p=0.95), eos_token_id=(1,)),
    ),
    "Kimi-K2": ({"max_length": 131072, "eos_token_id": 163586}, GenerationConfig(eos_token_id=(163586,))),
    "several ends, all filters": (
        {
            "eos_token_id": [3, 5],
            "temperature": 1,
            "top_k": 20,
            "top_p": 0.8,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "max_new_tokens": 9,
        },
        GenerationConfig(
            sampling=Sampling(temperature=1, top_k=20, top_p=0.8, min_p=0.05, repetition_penalty=1.1),
            eos_token_id=(3, 5),
            max_new_tokens=9,
        ),
    ),
    "it does not sample": (
        {"do_sample": False, "temperature": 0.6, "top_p": 0.9},
        GenerationConfig(sampling=Sampling(top_p=0.9), eos_token_id=(7,)),
    ),
    "it samples, and says no more": (
        {"do_sample": True},
        GenerationConfig(sampling=Sampling(temperature=1.0), eos_token_id=(7,)),
    ),
    "nulls": (
        {"temperature": None, "top_k": None, "eos_token_id": None, "max_new_tokens": None},
        GenerationConfig(eos_token_id=(7,)),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_read(written, case):
    content, right = CASES[case]
    assert load_generation_config(written(content)) == right


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"temperature": -1}, r"temperature: must be a finite number of at least 0: got -1"),
        ({"temperature": "x"}, r"temperature: must be a finite number of at least 0: got 'x'"),
        ({"top_p": 0, "do_sample": True}, r"top_p: must be a number above 0 and at most 1: got 0"),
        ({"do_sample": 3}, r"do_sample: must be true or false: got 3"),
        ({"eos_token_id": "x"}, r"eos_token_id: must be an integer of at least 0, or a list of them: got 'x'"),
        ({"eos_token_id": [1, -1]}, r"eos_token_id: must be an integer .*: got \[1, -1\]"),
        ({"max_new_tokens": 0}, r"max_new_tokens: must be an integer of at least 1: got 0"),
        ("[1]", r"must be a JSON object: got list"),
        ("{", r"must be a JSON object: .*"),
    ],
)
def test_what_is_refused(written, content, message):
    directory = written(content)
    with pytest.raises(InputError, match=rf"^{directory}/generation_config.json: {message}$"):
        load_generation_config(directory)


def test_a_directory_without_a_configuration(tmp_path):
    with pytest.raises(InputError, match=rf"^{tmp_path}/config.json: must be a readable file"):
        load_generation_config(tmp_path)
    assert small_config().eos_token_id is not None
