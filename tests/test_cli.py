"""The command line as a user meets it: each command, its output, its errors and its exit status."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from attrs import evolve

from mla_fx import cli, models, orchestrations
from mla_fx.cli import main
from mla_fx.models import deepseek_v3_config, small_config, write_checkpoint
from mla_fx.models.addition import DIRECTORY, problems
from tests.backends.ascend.conftest import why_not
from tests.test_imports import ROOT


def run(capsys, *arguments):
    status = main(arguments)
    out, err = capsys.readouterr()
    return status, out, err


QUICK = ("decode", "--steps", "3", "--prompt", "5")


def deviation(out: str) -> float:
    """The largest one; the typical one is smaller, and both are told with the choices that agree."""
    found = re.search(
        r"deviation from reference: (\S+) typical, (\S+) largest, of the logits' root mean square; "
        r"(\d+) of (\d+) most likely tokens are the same",
        out,
    )
    assert found and re.search(r"\d+ tokens in [\d.]+ s: [\d.]+ tokens per second", out)
    assert float(found[1]) <= float(found[2]) and int(found[3]) <= int(found[4])
    return float(found[2])


@pytest.mark.parametrize(
    ("dtype", "limit", "orchestration"),
    [
        ("bf16", 3.0, "serial"),
        ("bf16", 3.0, "exchange-aside"),
        ("fp16", 0.5, "attention-aside"),
        ("fp32", 1e-4, "exchange-aside"),
        ("fp64", 1e-11, "attention-aside"),
    ],
)
def test_decode_stays_near_the_reference(capsys, dtype, limit, orchestration):
    """In 16 bits a token may go to another expert, which is why a single logit may be far off."""
    status, out, _ = run(capsys, *QUICK, "--dtype", dtype, "--orchestration", orchestration, "--ranks", "4")
    assert status == 0
    assert "built-in model, trained to add: 3 layers, 8 heads, latent 32" in out
    assert f"cpu, 4 ranks, {dtype}, {orchestration} (minimal)" in out
    assert 0 < deviation(out) < limit


@pytest.mark.parametrize(
    "options",
    [
        ("--interleave", "4", "--block-size", "8", "--ranks", "4", "--prompt", "40"),
        ("--new-tokens", "3", "--replicate-query", "--mode", "conservative"),
        ("--adversary", "11", "--ranks", "1", "--prompt", "1"),
        ("--orchestration", "batch-pipelined", "--project-before-merge"),
        ("--orchestration", "dual-batch", "--new-tokens", "2"),
        ("--orchestration", "shared-experts-aside", "--round-angles"),
        ("--orchestration", "prefetch"),
    ],
    ids=" ".join,
)
def test_decode_options(capsys, options):
    status, out, _ = run(capsys, *QUICK, "--dtype", "fp32", *options)
    assert status == 0 and deviation(out) < 1e-4


def test_decode_in_8_bits(capsys):
    """Where float32 rounds another way than float64, an activation differs by a whole step."""
    status, out, _ = run(capsys, *QUICK, "--dtype", "fp32", "--quantization", "w8a8", "--requests", "3")
    assert status == 0 and deviation(out) < 0.5


def test_decode_solves_problems_when_it_is_asked_nothing(capsys):
    status, out, _ = run(capsys, "decode", "--requests", "4", "--dtype", "fp32")
    assert status == 0 and deviation(out) < 1e-4
    for prompt, answer in problems(4):
        assert f"{prompt} {answer}\n" in out


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A checkpoint of another model, with a tokenizer and a chat template."""
    path = tmp_path_factory.mktemp("model")
    write_checkpoint(path, evolve(small_config(), vocab_size=32), shards=2)
    shutil.copy(DIRECTORY / "tokenizer.json", path)
    (path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    return path


def test_decode_a_checkpoint(capsys, directory):
    status, out, _ = run(capsys, *QUICK, "--model", str(directory), "--dtype", "fp32")
    assert status == 0 and f"{directory}: 4 layers" in out and deviation(out) < 1e-4


def test_the_reference_is_the_reference(capsys):
    status, out, _ = run(capsys, *QUICK, "--backend", "reference", "--dtype", "fp64")
    assert status == 0 and deviation(out) == 0
    status, out, _ = run(capsys, *QUICK, "--no-reference")
    assert status == 0 and "deviation" not in out


def test_a_wrong_result_would_be_told(capsys, monkeypatch):
    """The deviation is measured: a rule with a fault shows."""
    from mla_fx.backends import cpu
    from mla_fx.effects import ops

    def wrong(recv, recv_lse, local, local_lse, *, run, flat):
        return (local.clone(),)  # history forgotten

    monkeypatch.setattr(cpu, "TABLE", cpu.TABLE.with_rules({ops.Combine: wrong}))
    status, out, _ = run(capsys, *QUICK, "--dtype", "fp32")
    assert status == 0 and deviation(out) > 0.1


#: The number of the wait that orders the uses of the workspace.
WORKSPACE = "23"


def test_show(capsys):
    status, out, _ = run(capsys, "show")
    assert status == 0
    assert out.startswith("attention_step  T=4 B=4 H=128 N=16 W=8 bf16    orchestration attention-aside")
    assert re.search(r"^ 0  main  stage batch.positions batch.slots batch.block_table$", out, re.MULTILINE)
    assert re.search(rf"^{WORKSPACE}  side  wait e0    # workspace$", out, re.MULTILINE)
    assert "19 launches, 1 stage, 2 records, 2 waits, 0 keeps, 21 drops on 2 streams (main, side)" in out
    _, conservative, _ = run(capsys, "show", "--mode", "conservative", "--layers", "2")
    assert "12 keeps" in conservative


def test_numbers_are_those_of_the_effects(capsys):
    """What `show` calls number K is what `check --without K` leaves out."""
    _, out, _ = run(capsys, "show")
    numbered = re.findall(r"^ *(\d+)  (\w+) +(.*)$", out, re.MULTILINE)
    assert [int(number) for number, _, _ in numbered] == list(range(len(numbered)))
    for number, _, effect in numbered[:: len(numbered) // 5]:
        _, out, _ = run(capsys, "check", "--without", number)
        assert out.splitlines()[0] == f"without {number}: {effect}"


def test_show_the_step(capsys):
    """Before it is scheduled: no stream, and every shape."""
    status, out, _ = run(capsys, "show", "--step", "--layers", "1")
    assert status == 0 and out.startswith("{ model_step 1 layers  T=4")
    assert "    params.lm_head: bf16[16160, 7168] parameter\n" in out and "    # layers.0.attention.keys\n" in out
    assert "record" not in out and "main" not in out


def test_show_the_cost(capsys):
    """Of one layer's attention by hand: T = 4, N = 16, L + R = 576, H = 128, L = 512 and an LSE, D = 7168; bf16."""
    status, out, _ = run(capsys, "show", "--cost")
    assert status == 0
    gathered, exchanged = 7 * 4 * 16 * 576 * 2, 7 * 4 * 128 * (512 * 2 + 4) // 8
    reduced = 2 * 7 * 4 * 7168 * 2 // 8
    sent = f"  gather_heads {gathered:,}, all_to_all {exchanged:,}, all_reduce {reduced:,}"
    assert out.splitlines()[:4] == [
        "19 launches, of which 18 run one after the other in every execution",
        "2 records, 2 waits, 0 keeps",
        f"each rank sends {gathered + exchanged + reduced:,} bytes over the wire, and receives as many",
        sent,
    ]
    of_values, planned = (
        int(re.search(r"take (?:at most )?([\d,]+)", line)[1].replace(",", "")) for line in out.splitlines()[-2:]
    )
    assert 0 < of_values <= planned <= 1.25 * of_values
    _, out, _ = run(capsys, "show", "--cost", "--layers", "5")
    both = f"{gathered:,}, all_to_all {exchanged:,}, all_reduce {2 * reduced:,}; "
    assert f"  each of layers.0 to layers.4: gather_heads {both}" in out and "  outside of layers: all_reduce" in out


def test_show_what_all_orchestrations_cost(capsys):
    status, out, _ = run(capsys, "show", "--costs", "--layers", "4", "--mode", "conservative")
    rows = [line.strip("| ").split(" | ") for line in out.splitlines()]
    assert status == 0 and rows[0][:2] == ["orchestration", "launches"]
    found = {row[0].strip("`"): row for row in rows[2:]}
    assert list(found) == list(orchestrations.NAMED)
    assert found["serial"][1] == found["serial"][2] and found["serial"][3:5] == ["0", "0"]
    assert int(found["attention-aside"][4]) > 0  # what crosses streams is kept
    assert "does not fit" not in out
    _, out, _ = run(capsys, "show", "--costs")  # of one attention, which has no experts
    assert "| `shared-experts-aside` | does not fit the step |" in out and out.count("does not fit") < len(found) - 2


def test_show_a_checkpoints_program(capsys, tmp_path):
    write_checkpoint(tmp_path, small_config())
    status, out, _ = run(capsys, "show", "--model", str(tmp_path), "--ranks", "2")
    assert status == 0 and "H=16 N=8 W=2" in out


def test_check(capsys):
    status, out, _ = run(capsys, "check", "--layers", "61")
    assert status == 0 and out.startswith("legal: 2057 launches, 1 stage, 122 records, 122 waits, 0 keeps")
    status, out, _ = run(capsys, "check", "--without", WORKSPACE)
    assert status == 1
    assert out.startswith(f"without {WORKSPACE}: wait e0    # workspace\n")
    assert (
        "rule 2: history_attention (hist) on main and current_attention (cur) on side share workspace 'workspace'"
        in out
    )
    assert "not legal: " in out


def test_check_every_orchestration(capsys):
    """Each makes of the step what it wants of it."""
    for name in orchestrations.NAMED:
        for options in (("--layers", "4"), ("--replicate-query", "--project-before-merge", "--layers", "4")):
            status, out, _ = run(capsys, "check", "--orchestration", name, *options)
            assert status == 0 and out.startswith("legal: ")
    status, out, _ = run(capsys, "show", "--orchestration", "batch-pipelined", "--step")
    assert status == 0 and "    # attention.batch.1.query\n" in out and "batch[1].positions" in out


MINE = """
from mla_fx.effects import Aval, Input, Launch, Orchestration, Program, ops


def two_streams(equation):
    return "side" if isinstance(equation.op, ops.Linear) else "main"


idle = Orchestration("idle", two_streams, streams=("side", "third"))


add = Launch("side", ops.Add(), ("x", "y"), ("total",))
program = Program((Input("x", Aval((1, 2), "fp32")), Input("y", Aval((1, 2), "fp32"))), ("total",), (add,))
number = 7
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield
    sys.modules.pop("mine", None)


def test_an_orchestration_and_a_program_of_ones_own(capsys, mine):
    status, out, _ = run(capsys, "check", "--orchestration", "mine:two_streams")
    assert status == 0 and "2 streams (main, side)" in out
    status, out, _ = run(capsys, "check", "--program", "mine:program")
    assert status == 1
    assert "rule 1: add (total) on side takes input x, which is ready on main" in out
    assert "rule 5: side has not joined main at the end" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("check", "--ranks", "3"), "num_attention_heads: must be a multiple of the ranks, 3: got 128"),
        (
            ("show", "--orchestration", "fast"),
            "--orchestration: must be one of serial, exchange-aside, attention-aside, shared-experts-aside, "
            "batch-pipelined, dual-batch, prefetch or module:name: got 'fast'",
        ),
        (
            ("show", "--orchestration", "dual-batch"),
            "--orchestration: dual-batch splits whole layers: must come with --la",
        ),
        (
            ("show", "--orchestration", "shared-experts-aside"),
            "orchestration shared-experts-aside: each of its streams must be given an equation of attention_step",
        ),
        (
            ("show", "--orchestration", "batch-pipelined", "--tokens", "1"),
            "tokens: must be at least 2 to be split into micro-batches: got 1",
        ),
        (("show", "--orchestration", "nowhere:fast"), "--orchestration: must be module:name of something that can be"),
        (("check", "--program", "mine:number"), "--program: must be a Program: got int"),
        (("check", "--without", "99"), "--without: must be in 0..44: got 99"),
        (
            ("check", "--orchestration", "mine:idle"),
            "orchestration idle: each of its streams must be given an equation of attention_step",
        ),
        ((*QUICK, "--interleave", "3"), "interleave: must divide block_size, 16: got 3"),
        (("decode", "--prompt", "0"), "--prompt: must be at least 1: got 0"),
        (("decode", "--steps", "2000"), "--steps: prompt and steps must fit max_position_embeddings, 1024: got 20"),
        ((*QUICK, "--model", "nowhere"), "--model: must be a checkpoint directory: got 'nowhere'"),
    ],
)
def test_errors_name_the_field(capsys, mine, arguments, message):
    status, _, err = run(capsys, *arguments)
    assert status == 2
    assert err.startswith(f"mla-fx {arguments[0]}: ") and message in err
    assert "Traceback" not in err


def test_argument_errors(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["decode", "--ranks", "zero"])
    assert caught.value.code == 2
    assert "argument --ranks: must be an integer of at least 1: got 'zero'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["decode", "generate", "show", "check", "probe"])
def test_help_is_worth_reading(capsys, command):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "examples:" in out and len(out.split()) > 150
    for line in re.findall(r"^  mla-fx (.*)$", out, re.MULTILINE):
        assert line.startswith(command)


#: Those of the probe are for an NPU, or many processes; `tests/backends/ascend/test_probe_command.py` has what can run.
COMMANDS = [line.split("    ")[0] for name in cli._EXAMPLES if name != "probe" for line in cli._EXAMPLES[name]]
COMMANDS += [
    f"mla-fx decode {found}" for found in re.findall(r'make decode ARGS="(.*?)"', (ROOT / "README.md").read_text())
]
COMMANDS += re.findall(r"`(mla-fx \w+ --without \d+)`", (ROOT / "README.md").read_text())
COMMANDS += re.findall(r"^(mla-fx \w+ .*?)\s+#", (ROOT / "README.md").read_text(), re.MULTILINE)
#: `tests/test_cli_processes.py` has those.
COMMANDS = [command for command in COMMANDS if "--processes" not in command]


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_of_the_help_and_the_readme_run(capsys, mine, monkeypatch, directory, command):
    """Shortened to two steps that nothing is compared with, and narrow on the emulated device; only leaving an effect
    out is illegal."""
    if ("--emulate" in command or "--device-trace" in command) and (reason := why_not()):
        pytest.skip(reason)
    if "--device-trace" in command:
        v3 = deepseek_v3_config()
        narrow = evolve(v3, attention=evolve(v3.attention, hidden_size=256, q_lora_rank=128))
        monkeypatch.setattr(models, "deepseek_v3_config", lambda: narrow)
    shutil.copytree(directory, "DIR")
    short = ["--steps", "2", "--no-reference", *(["--prompt", "20"] if "--model" in command else [])]
    arguments = shlex.split(command)[1:] + (short if "decode" in command else [])
    status, out, err = run(capsys, *arguments)
    assert (status, "Traceback" in err) == ("--without" in command, False), err
    assert len(out.splitlines()) >= 1


def test_ctrl_c_leaves_no_traceback(capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("mla_fx.cli_decode.decode", interrupted)
    status, _, err = run(capsys, *QUICK)
    assert status == 130 and err == "\nmla-fx decode: stopped\n"


def test_a_reader_that_goes_away(tmp_path):
    """`mla-fx show | head -1` ends quietly, with more to say than a pipe holds (64 KiB)."""
    code = "from mla_fx.cli import main; raise SystemExit(main(['show', '--layers', '24']))"
    done = subprocess.run(
        f'{sys.executable} -c "{code}" | head -1',
        shell=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith("model_step 24 layers") and done.stderr == ""
