"""`mla-fx generate` as a user meets it: text as it comes, figures at the end, errors, and Ctrl-C."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from safetensors.torch import load_file, save_file

from mla_fx.models.addition import DIRECTORY, problems
from mla_fx.models.tokenizer import Tokenizer
from tests.commands import chatty
from tests.test_cli import run
from tests.test_imports import ROOT

PROMPTS = ("347 + 25 =", "9 + 4 =", "612 + 303 =")
ANSWERS = ("372", "13", "915")


def texts(out: str) -> list[tuple[str, str]]:
    lines = out.splitlines()
    assert all(line.startswith("> ") for line in lines[::2])
    return [(prompt.removeprefix("> "), text) for prompt, text in zip(lines[::2], lines[1::2], strict=True)]


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--ranks", "8", "--orchestration", "exchange-aside", "--mode", "conservative"),
        ("--requests", "1", "--block-size", "4", "--interleave", "4", "--dtype", "fp16"),
        ("--drafts", "2"),  # several are finished in one step
        ("--drafts", "2", "--chunk", "4", "--dtype", "fp32"),
        ("--quantization", "w8a8", "--drafts", "1", "--ranks", "4"),
        ("--adversary", "5", "--backend", "cpu"),
        ("--backend", "reference", "--ranks", "1", "--replicate-query"),
        ("--blocks", "4", "--block-size", "4", "--ranks", "1", "--requests", "3", "--max-new-tokens", "5"),
    ],
    ids=" ".join,
)
def test_several_prompts_however_they_are_run(capsys, options):
    asked = [argument for prompt in PROMPTS for argument in ("--prompt", prompt)]
    status, out, err = run(capsys, "generate", *asked, *options)
    assert status == 0, err
    assert texts(out) == list(zip(PROMPTS, ANSWERS, strict=True))
    figures = r"(\d+) tokens in [\d.]+ s: [\d.]+ tokens per second, time to first token [\d.]+ s \(median of 3\)"
    found = re.search(figures, err)
    assert found and int(found[1]) == sum(len(answer) + 1 for answer in ANSWERS)  # and an end each
    assert ("drafts accepted" in err) == ("--drafts" in options)


def test_without_a_prompt_the_built_in_model_solves_problems(capsys):
    status, out, _ = run(capsys, "generate", "--seed", "3")
    assert status == 0 and texts(out) == problems(3, seed=3)


def test_limit_end_and_temperature(capsys):
    _, out, err = run(capsys, "generate", "--prompt", PROMPTS[0], "--max-new-tokens", "2")
    assert texts(out) == [(PROMPTS[0], "37")] and err.startswith("2 tokens in ")
    _, _, err = run(capsys, "generate", "--prompt", PROMPTS[0], "--ignore-end", "--max-new-tokens", "9")
    assert err.startswith("9 tokens in ")
    hot = [run(capsys, "generate", "--prompt", PROMPTS[0], "--temperature", "9", "--seed", seed)[1] for seed in "1123"]
    assert hot[0] == hot[1] and len(set(hot)) > 1


@pytest.fixture
def directory(tmp_path):
    """The trained model with a chat template."""
    return chatty(tmp_path)


def test_what_the_checkpoint_says_and_what_the_user_says(capsys, directory):
    """generation_config.json: its limit and its end; options count for more."""
    (directory / "generation_config.json").write_text('{"max_new_tokens": 2, "temperature": 50.0}')
    model = ("--model", str(directory), "--prompt", PROMPTS[0])
    _, hot, err = run(capsys, "generate", *model)
    assert err.startswith("2 tokens in ")
    _, out, _ = run(capsys, "generate", *model, "--temperature", "0", "--max-new-tokens", "8")
    assert texts(out) == [(PROMPTS[0], "372")] and texts(hot) != [(PROMPTS[0], "37")]
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 11]}')  # 11 is "7"
    _, out, _ = run(capsys, "generate", *model)
    assert texts(out) == [(PROMPTS[0], "37")]
    _, out, _ = run(capsys, "generate", *model, "--ignore-end", "--stop", "2", "--stop", "9")
    assert texts(out) == [(PROMPTS[0], "37")]


def test_logprobs_prefixes_and_what_is_put_around(capsys):
    """On the error stream; the text is the same."""
    _, out, err = run(capsys, "generate", "--prompt", PROMPTS[1], "--logprobs", "2", "--ranks", "1", "--dtype", "fp32")
    assert texts(out) == [(PROMPTS[1], ANSWERS[1])]
    lines = re.findall(
        r"^prompt 1: '(.+)' (-?[\d.]+) \(likeliest: '(.+)' (-?[\d.]+), '.+' (-[\d.]+)\)$", err, re.MULTILINE
    )
    assert [line[0] for line in lines] == ["1", "3", "<eos>"]
    assert all(line[:2] == line[2:4] for line in lines)
    assert "around each prompt, by tokenizer.json: <bos>\n" in err
    same = [argument for _ in range(3) for argument in ("--prompt", PROMPTS[0])]
    _, out, err = run(capsys, "generate", *same, "--requests", "1", "--ranks", "1", "--block-size", "4")
    assert texts(out) == [(PROMPTS[0], ANSWERS[0])] * 3
    assert "prefix cache: 8 of 24 tokens of prompts found (33%)" in err
    _, out, err = run(capsys, "generate", *same, "--requests", "1", "--no-prefix-cache")
    assert texts(out) == [(PROMPTS[0], ANSWERS[0])] * 3 and "prefix cache" not in err


@pytest.mark.parametrize("from_lines", [False, True])
def test_a_conversation(capsys, monkeypatch, directory, from_lines):
    """Turns as options or as lines; what was said before is in the prompt, and its blocks are there already."""
    turns = [argument for prompt in PROMPTS[:2] for argument in ("--prompt", prompt)]
    if from_lines:
        turns = []
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{prompt}\n" for prompt in PROMPTS[:2])))
    asked = ("--model", str(directory), "--chat", *turns, "--ranks", "1", "--block-size", "2", "--dtype", "fp32")
    status, out, err = run(capsys, "generate", *asked)
    assert status == 0, err
    assert texts(out)[0] == (PROMPTS[0], ANSWERS[0]) and texts(out)[1][0] == PROMPTS[1]
    found, of = map(int, re.search(r"prefix cache: (\d+) of (\d+) tokens", err).groups())
    assert (found, of) == (10, 8 + (8 + 4) + 5)  # the first turn and its answer in blocks of two, without the end


def test_a_system_speaks_first(capsys, directory):
    asked = ("--model", str(directory), "--chat", "--prompt", PROMPTS[0], "--max-new-tokens", "3", "--logprobs", "0")
    plain, told = (run(capsys, "generate", *asked, *more)[2] for more in ((), ("--system", PROMPTS[1])))
    assert [re.search(r"of (\d+) tokens of prompts", err)[1] for err in (plain, told)] == ["8", "13"]


def test_a_prompt_without_a_token(capsys, directory):
    """Where nothing is put around it, it is refused before any weight is read."""
    fields = json.loads((DIRECTORY / "tokenizer.json").read_text()) | {"post_processor": None}
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer.json").write_text(json.dumps(fields))
    (directory / "model.safetensors").unlink()
    status, out, err = run(capsys, "generate", "--model", str(directory), "--prompt", PROMPTS[0], "--prompt", "")
    assert status == 2 and not out
    assert err == "mla-fx generate: --prompt: must have at least one token: got '', and nothing is put around it\n"


def test_a_text_that_ends_in_an_error(capsys, directory):
    """One prompt has a token whose embedding is infinite: it is named, the other is answered, the status is 1."""
    tensors = load_file(directory / "model.safetensors")
    (bad,) = Tokenizer(directory).encode("6")[1:]
    tensors["model.embed_tokens.weight"][bad] = float("inf")
    (directory / "model.safetensors").unlink()
    save_file(tensors, directory / "model.safetensors")
    asked = ("--prompt", PROMPTS[0], "--prompt", "6 + 1 =", "--dtype", "fp32")
    status, out, err = run(capsys, "generate", "--model", str(directory), *asked)
    assert status == 1 and texts(out) == [(PROMPTS[0], ANSWERS[0]), ("6 + 1 =", "")]
    assert "mla-fx generate: prompt 2: logits: must be finite, and are not behind 5 tokens\n" in err


def test_text_comes_as_it_is_generated():
    """The first characters are there long before the last."""
    code = (
        "import sys; from mla_fx.cli import main; "
        "raise SystemExit(main(['generate', '--ignore-end', '--max-new-tokens', '900']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        first = process.stdout.readline()
        assert first.startswith("> ") and process.stdout.read(3) and process.poll() is None
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "Traceback" not in err and err.endswith("mla-fx generate: stopped\n")
    assert re.search(r"\d+ tokens in [\d.]+ s", err)  # what there is to report is reported


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", str(DIRECTORY)), "--prompt: must be given with --model: got none"),
        (("--model", "nowhere", "--prompt", "1"), "--model: must be a checkpoint directory: got 'nowhere'\n"),
        (
            ("--model", "deepseek-ai/DeepSeek-V2-Lite", "--prompt", "1"),
            "`hf download deepseek-ai/DeepSeek-V2-Lite --local-dir DIR`",
        ),
        (("--system", "Be brief."), "--system: is for --chat: got 'Be brief.'"),
        (("--chat", "--prompt", "1"), "chat_template: must be in chat_template.jinja or tokenizer_config.json of "),
        (("--stop", ""), "stop: must be a sequence of texts that are not empty: got ['']"),
        (("--seed", "-1"), "seed: must be an integer in 0..2**64 - 1: got -1"),
        (("--ranks", "3"), "ranks: must divide num_attention_heads, 8: got 3"),
        (("--temperature", "-1"), "temperature: must be a finite number of at least 0: got -1.0"),
        (("--blocks", "1", "--block-size", "2"), "need 10 blocks of 4, and a request can have 1"),
        (("--max-new-tokens", "1020"), "max_new_tokens: with the prompt must be at most max_position_embeddings, 1024"),
        (("--chunk", "1"), "chunk: must be an integer of at least the requests of a step, 2: got 1"),
        (("--prompt", "1", "--interleave", "3"), "interleave: must divide block_size, 16: got 3"),
    ],
)
def test_errors_name_the_field(capsys, arguments, message):
    status, out, err = run(capsys, "generate", *arguments)
    assert status == 2 and not out
    assert err.startswith("mla-fx generate: ") and message in err and "Traceback" not in err


def test_a_directory_without_a_tokenizer(capsys, tmp_path):
    for name in ("config.json", "model.safetensors"):
        os.link(DIRECTORY / name, tmp_path / name)
    status, _, err = run(capsys, "generate", "--model", str(tmp_path), "--prompt", "1")
    assert status == 2
    assert "tokenizer.json: must be a readable file, or tiktoken.model must lie beside it: got neither" in err
