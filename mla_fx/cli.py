"""The command line: `mla-fx decode`, `generate`, `plan`, `show`, `check`, `probe`.

An edge of the package: it chooses backends and reads checkpoints.
"""

import argparse
import contextlib
import importlib
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mla_fx import backends, cli_plan, orchestrations
from mla_fx.backends.peers import STOPPED, PeerError
from mla_fx.cli_group import first_to_say, place, stoppable
from mla_fx.cli_processes import launch
from mla_fx.decode import QUANTIZATIONS
from mla_fx.effects import InputError, LawError, Orchestration, ScheduleError
from mla_fx.effects.aval import FLOATS, ShapeError
from mla_fx.effects.orchestration import orchestration

_DECODE = """
Decode with a DeepSeek model under decode context parallelism, and compare every
step with the float64 reference.  All ranks run in this process; or one in each,
where torchrun has started it or --processes asks for it, and one of them prints.

The model comes from a DeepSeek-V3-format checkpoint directory (config.json and
safetensors), or is the small trained one that ships with the package, which
adds numbers.  Prompts are brought into the sharded, paged caches first; then
every step feeds each request's last token through all layers and takes the
most likely next one.  The same tokens run on the float64 reference beside it.
At the end: tokens per second, and the largest deviation of the logits from the
reference, relative to their root mean square.
"""
_GENERATE = """
Generate text with a DeepSeek model: a checkpoint directory with config.json,
safetensors (bf16, fp16, fp32, or FP8 in blocks) and tokenizer.json or
tiktoken.model, or the small trained model that ships with the package, which
adds numbers.

Prompts are served together by continuous batching and chunked prefill; text is
printed as it comes, prompt after prompt.  With --chat they are the turns of one
conversation, in the form of the checkpoint's chat template.  At the end, on the
error stream: tokens per second, time to first token, the acceptance rate of
drafts, the hit rate of the prefix cache, what the tokenizer puts around a text.
Under torchrun, or with --processes, each process runs one rank on a device of
its own, and one of them prints.

What no option says is as in generation_config.json; without that, greedy.
Ctrl-C stops.
"""
_SHOW = """
Print the program of an orchestration: what is staged, launches with their
streams, and the records, waits, keeps and drops derived for them, numbered.
--step prints the step instead, before anything is scheduled: inputs, equations
by scope, outputs, with all shapes; --ops what each op takes and gives.  --cost
prints what the program costs on paper: launches, events, keeps, bytes on the
wire, memory; --costs the same of all named orchestrations, as a table; --growth
what one layer's attention costs a rank, from 1 to 256 ranks and 1k to 1M tokens
of history.  Sizes are those of DeepSeek-V3 unless --model names a checkpoint
directory.
"""
_CHECK = """
Say whether a program is legal: the program of an orchestration, of yours
(module:name, an Orchestration or a function from equation to stream), or one
you wrote (--program module:name).  --without K leaves effect number K out, as `mla-fx show` counts
them, to see what the law says to that.  Exit status 0: legal, 1: not.
"""
_PROBE = """
Ask an NPU what the Ascend backend builds on and only hardware can tell:
seventeen points, each held against the host.  Prints versions and the
environment, what holds, what does not, and what that means for the backend.
Nothing is changed and nothing written but the report of --json; what the device
refuses, or dies of, is an answer like any other.  Under torchrun every process
asks its own device, and all of them together what collectives do.  Exit status
1: something does not hold that the backend rests on.
"""
_EXAMPLES = {
    "decode": [
        "mla-fx decode --ranks 8 --block-size 128 --interleave 128 --dtype fp16",
        "mla-fx decode --model DIR --orchestration attention-aside --steps 100",
        "mla-fx decode --report --no-reference        bytes that were moved and held, rank by rank",
        "mla-fx decode --adversary 7        the same steps, late and out of order",
        "mla-fx decode --backend ascend --emulate        through torch_npu, without an NPU",
    ],
    "generate": [
        "mla-fx generate --prompt '347 + 25 =' --prompt '9 + 4 ='",
        "mla-fx generate --drafts 2 --ranks 4 --quantization w8a8",
        "mla-fx generate --model DIR --prompt '1 2 3' --max-new-tokens 20 --temperature 0.6 --top-p 0.95",
        "mla-fx generate --model DIR --chat --system '1 + 1 =' --prompt '2 + 3 =' --prompt '4 + 5 ='",
    ],
    "plan": cli_plan.EXAMPLES,
    "show": [
        "mla-fx show --orchestration exchange-aside --mode conservative",
        "mla-fx show --layers 4",
        "mla-fx show --step        what is scheduled",
        "mla-fx show --cost --layers 61        what it costs on paper",
        "mla-fx show --ops        what a step can be made of",
        "mla-fx show --ranks 2 --device-trace        what an emulated Ascend gets to do",
    ],
    "check": ["mla-fx check --layers 61", "mla-fx check --without 23", "mla-fx check --orchestration mine:two_streams"],
    "probe": [
        "mla-fx probe --json report.json",
        "mla-fx probe --emulate --cann 8.5        what that release is known to do",
        "torchrun --nproc-per-node 8 -m mla_fx probe",
    ],
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status (2: bad arguments or input, 130: stopped with Ctrl-C)."""
    options = _parser().parse_args(arguments)
    with stoppable():
        return _run(options, sys.argv[1:] if arguments is None else arguments)


def _run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    try:
        _must_be_directory(options.model)
        if getattr(options, "processes", None) is not None and place() is None:
            return launch(arguments, options.processes, patience=options.timeout)
        status: int = options.run(options)
        return status
    except (InputError, ShapeError, ScheduleError, LawError) as error:
        return _said(f"mla-fx {options.command}: {error}", 2)
    except PeerError as error:
        if error.why == STOPPED:
            return _said(f"\nmla-fx {options.command}: stopped", 130)
        return _said(f"mla-fx {options.command}: {error}", 1)
    except KeyboardInterrupt:
        return _said(f"\nmla-fx {options.command}: stopped", 130)
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _said(text: str, status: int) -> int:
    """In a group of processes, by one of those that have the same to say."""
    if first_to_say(text):
        print(text, file=sys.stderr)
    return status


def _must_be_directory(model: str | None) -> None:
    if model is None or Path(model).is_dir():
        return
    error = f"--model: must be a checkpoint directory: got {model!r}"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        error += (
            f"; if that is a model's name on the Hugging Face hub, `hf download {model} --local-dir DIR` fetches it"
        )
    raise InputError(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mla-fx",
        description="MLA decode under decode context parallelism, with stream effects that are derived and checked.",
        epilog="Each command has its own --help.",
    )
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="decode | generate | plan | show | check | probe"
    )
    decode = _command(commands, "decode", "run decode steps and compare them with the reference", _DECODE, _decode)
    generate = _command(commands, "generate", "generate text from prompts", _GENERATE, _generate)
    plan = _command(commands, "plan", "whether a model fits its devices", cli_plan.TEXT, cli_plan.plan)
    cli_plan.options(plan, _count, _natural)
    show = _command(commands, "show", "print the program of an orchestration", _SHOW, _show)
    check = _command(commands, "check", "the verdict of the law on a program", _CHECK, _check)
    _probe_options(_command(commands, "probe", "ask an NPU what the Ascend backend builds on", _PROBE, _probe))
    for command in (decode, generate, show, check):
        _shape_options(command, small=command in (decode, generate))
    for command in (decode, generate):
        _run_options(command)
    _decode_options(decode)
    _generate_options(generate)
    for command in (show, check):
        command.add_argument(
            "--layers", type=_count, metavar="N", help="a model of N whole layers instead of one layer's attention"
        )
        command.add_argument("--tokens", type=_count, default=4, metavar="T", help="tokens of a step (default 4)")
    show.add_argument(
        "--device-trace", action="store_true", help="run one step on the emulated Ascend and print what reached it"
    )
    show.add_argument("--step", action="store_true", help="print the step instead, before it is scheduled")
    show.add_argument("--cost", action="store_true", help="print what the program costs on paper instead")
    show.add_argument(
        "--costs", action="store_true", help="print a table of what all named orchestrations cost instead"
    )
    show.add_argument("--growth", action="store_true", help="print how it grows with ranks and history instead")
    show.add_argument("--ops", action="store_true", help="print the table of all ops instead")
    show.add_argument("--seed", type=int, default=0, help="of the emulated device (default 0)")
    check.add_argument("--program", metavar="MODULE:NAME", help="a Program of yours instead")
    check.add_argument("--without", type=int, metavar="K", help="leave effect number K out")
    return parser


def _command(commands: Any, name: str, line: str, text: str, run: Callable[..., int]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=line,
        description=text,
        epilog="examples:\n" + "\n".join(f"  {example}" for example in _EXAMPLES[name]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def _shape_options(parser: argparse.ArgumentParser, *, small: bool) -> None:
    add = parser.add_argument
    add("--model", metavar="DIR", help="checkpoint directory (default: built in)")
    add(
        "--ranks",
        type=_count,
        default=None if small else 8,
        metavar="W",
        help="ranks of the group (default: " + ("as many as processes, and 2 in one process)" if small else "8)"),
    )
    add(
        "--block-size",
        type=_count,
        default=16 if small else 128,
        metavar="S",
        help="tokens a cache block (default %(default)s)",
    )
    add(
        "--dtype",
        choices=FLOATS,
        default=None if small else "bf16",
        help="dtype of weights, cache and activations (default bf16"
        + (", or fp32 where the operators of Ascend do not take the model's sizes)" if small else ")"),
    )
    add(
        "--orchestration",
        default="attention-aside",
        metavar="NAME",
        help=f"{', '.join(orchestrations.NAMED)}, or module:name of yours (default %(default)s)",
    )
    add(
        "--mode",
        choices=("minimal", "conservative"),
        default="minimal",
        help="what is kept alive (default %(default)s)",
    )
    add("--replicate-query", action="store_true", help="every rank projects all heads' queries; nothing is gathered")
    add(
        "--project-before-merge",
        action="store_true",
        help="every rank projects all heads' values, which are exchanged in place of latents",
    )
    add("--round-angles", action="store_true", help="rotary angles in the dtype of activations, for fused operators")
    add("--quantization", choices=QUANTIZATIONS, help="store projections in 8 bits (default: in the dtype)")


def _run_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--interleave",
        type=_count,
        default=1,
        metavar="I",
        help="positions a rank owns in a row; divides the block (default 1)",
    )
    add("--no-expand", action="store_true", help="expand no keys and values of a prompt's new tokens, however many")
    add("--backend", choices=sorted(backends.NAMED), default="cpu", help="what runs the steps (default %(default)s)")
    add("--emulate", action="store_true", help="run --backend ascend on the emulated CANN, without an NPU")
    add(
        "--layout",
        metavar="tp=T,dcp=C,dp=D",
        help="ranks by group: T of them share heads, C of these the sequence, and there are D replicas, each with "
        "requests of its own (default: all share both)",
    )
    add("--processes", type=_count, metavar="N", help="run in N processes of this machine, one for each rank")
    add(
        "--timeout",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="how long a process waits for the others, at most (default %(default)g)",
    )
    add(
        "--requests",
        type=_count,
        default=2,
        metavar="B",
        help="requests in the batch, of each replica (default %(default)s)",
    )
    add(
        "--capture",
        type=_sizes,
        default=(),
        metavar="T,T,..",
        help="capture decode steps of so many tokens, on ascend and cuda; smaller ones are padded (as 1,2,4,8)",
    )
    add(
        "--capture-contexts",
        type=_sizes,
        default=(),
        metavar="N,N,..",
        help="capture each with tables for so long contexts too: on cuda a captured step costs what its table holds",
    )
    add("--seed", type=int, default=0, help="of what is drawn at random (default 0)")
    add("--adversary", type=int, metavar="SEED", help="run on the hostile machine, or the emulated one, with this seed")


def _decode_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--prompt",
        type=int,
        metavar="P",
        help="random tokens before the first step (default 40; the built-in model gets problems to solve)",
    )
    add(
        "--new-tokens",
        type=_count,
        default=1,
        metavar="Q",
        help="new tokens a request and step, as in speculative decoding (default 1)",
    )
    add("--steps", type=_count, default=32, metavar="N", help="decode steps (default %(default)s)")
    add("--no-reference", action="store_true", help="do not run the reference beside it")
    add("--report", action="store_true", help="print what was moved and held, beside what the formulas say")


def _generate_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prompt", action="append", metavar="TEXT", help="a prompt; may be given several times")
    add("--chat", action="store_true", help="prompts, or lines of standard input, are the turns of one conversation")
    add("--system", metavar="TEXT", help="what the system says before a conversation")
    add("--max-new-tokens", type=_count, metavar="N", help="tokens a prompt, at most (default: the model's, or 32)")
    add("--drafts", type=_natural, default=0, metavar="K", help="tokens the prediction module drafts (default 0)")
    add("--chunk", type=_count, metavar="T", help="tokens of a step, at most (default: 256, or what expanding wants)")
    add("--blocks", type=_count, metavar="C", help="cache blocks of a rank (default: enough for all requests)")
    add("--no-prefix-cache", action="store_true", help="share no blocks between prompts that begin alike")
    add("--ignore-end", action="store_true", help="go on behind the end of a text")
    add("--stop", action="append", metavar="TEXT", help="a text that ends the output; may be given several times")
    add("--logprobs", type=_natural, metavar="K", help="print each token's logprob and those of the K likeliest")
    add("--temperature", type=float, help="of sampling; 0 is greedy (default: the model's, or 0)")
    add("--top-k", type=int, metavar="K", help="sample from the K likeliest tokens; 0: from all")
    add("--top-p", type=float, metavar="P", help="sample from the fewest tokens that are P likely together")
    add("--min-p", type=float, metavar="P", help="sample from tokens at least P times as likely as the likeliest")
    add("--repetition-penalty", type=float, metavar="X", help="makes tokens of prompt and text less likely (above 1)")
    add("--presence-penalty", type=float, metavar="X", help="subtracted from the logits of tokens of the text")


def _probe_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--emulate", action="store_true", help="ask the emulated CANN, without an NPU")
    add("--cann", metavar="RELEASE", help="to emulate: 8.5, 9.0 or 9.1 (default: the newest)")
    add("--json", metavar="FILE", help="write the report there")
    parser.set_defaults(model=None)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(_count, text.split(",")))


def _natural(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"must be an integer of at least 0: got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number of seconds above 0: got {text!r}")


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1: got {text!r}")
    return int(text)


def chosen_orchestration(name: str) -> Orchestration:
    """The orchestration called `name`, or the one, or function from equation to stream, at `module:name`."""
    if name in orchestrations.NAMED:
        return orchestrations.NAMED[name]
    if ":" in name:
        return orchestration(named(name, "--orchestration"))
    raise InputError(f"--orchestration: must be one of {', '.join(orchestrations.NAMED)} or module:name: got {name!r}")


def named(path: str, option: str) -> Any:
    """The object at `module:name`, where modules of the working directory count."""
    module, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            f"{option}: must be module:name of something that can be imported: got {path!r} ({error})"
        ) from None


def _decode(options: argparse.Namespace) -> int:
    from mla_fx.cli_backend import together  # torch's operators are loaded only where something runs
    from mla_fx.cli_decode import decode

    with together(options):
        return decode(options, chosen_orchestration(options.orchestration))


def _generate(options: argparse.Namespace) -> int:
    from mla_fx.cli_backend import together
    from mla_fx.cli_generate import generate

    with together(options):
        return generate(options, chosen_orchestration(options.orchestration))


def _probe(options: argparse.Namespace) -> int:
    from mla_fx.cli_probe import probe

    return probe(options)


def _show(options: argparse.Namespace) -> int:
    from mla_fx.cli_show import show

    return show(options)


def _check(options: argparse.Namespace) -> int:
    from mla_fx.cli_show import check

    return check(options)
