"""`mla-fx plan`: whether a model fits the memory of its devices, and what each rank would hold."""

import argparse
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

from attrs import evolve, frozen

from mla_fx import Layout, StepShape, models
from mla_fx.decode import QUANTIZATIONS
from mla_fx.effects import InputError
from mla_fx.effects.aval import FLOATS
from mla_fx.models.plan import Plan, largest_context, most_requests

TEXT: Final = """
Say whether a model fits the memory of its devices, from config.json alone:
nothing is read of the weights, and nothing allocated.  Prints what each rank
would hold, the longest context and the most requests that fit, and what the
layout costs.  Sizes are those of DeepSeek-V3 unless --model names a directory
with a config.json.

What is not known without the device is not guessed: the scratch of its
attention operator is what --workspace says, and --reserve is for the buffers
of the transport, for what an allocator loses, and for what an operator makes
for itself.  Exit status 1: it does not fit.
"""
EXAMPLES: Final = [
    "mla-fx plan --layout tp=16,dcp=8,dp=2,ep=32 --device-memory 64GiB --quantization w8a8",
    "mla-fx plan --model DIR --layout tp=8 --device-memory 80GB --requests 32 --context 16384 --json",
]

_UNITS: Final = {
    f"{prefix}{unit}": base**power
    for unit, base in (("iB", 1024), ("B", 1000))
    for power, prefix in enumerate("KMGT", 1)
}
_GIB: Final = 2**30


def memory_size(text: str) -> int:
    """Bytes that a text says: a number and a unit.

    >>> memory_size("64GiB"), memory_size("1.5 MB")
    (68719476736, 1500000)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]i?B)", text.strip())
    if not found:
        raise argparse.ArgumentTypeError(
            f"must be a number and a unit, of {', '.join(_UNITS)}, as in 64GiB: got {text!r}"
        )
    return int(float(found[1]) * _UNITS[found[2]])


def options(parser: argparse.ArgumentParser, count: Callable[[str], int], natural: Callable[[str], int]) -> None:
    """Add the options of the command; `count` and `natural` read integers of at least 1 and 0."""
    add = parser.add_argument
    add("--model", metavar="DIR", help="directory with a config.json (default: DeepSeek-V3 as published)")
    add("--layout", required=True, metavar="L", help="how ranks are laid out, as in tp=16,dcp=8,dp=2,ep=32")
    add("--device-memory", required=True, type=memory_size, metavar="SIZE", help="memory of a device, as in 64GiB")
    add("--quantization", choices=QUANTIZATIONS, help="store projections in 8 bits (default: in the dtype)")
    add("--dtype", choices=FLOATS, default="bf16", help="of weights, cache and activations (default %(default)s)")
    add("--requests", type=count, default=16, metavar="B", help="requests of a replica at a time (default %(default)s)")
    add("--context", type=count, metavar="N", help="tokens of each request (default 8192, or what the model takes)")
    add("--chunk", type=count, metavar="T", help="tokens of a step, at most (default: 256, or what expanding wants)")
    add("--drafts", type=natural, default=0, metavar="K", help="tokens the prediction module drafts (default 0)")
    add("--block-size", type=count, default=128, metavar="S", help="tokens a cache block (default %(default)s)")
    add("--orchestration", default="attention-aside", metavar="NAME", help="as for decode (default %(default)s)")
    add("--replicate-query", action="store_true", help="every rank projects the queries of its whole context group")
    add("--project-before-merge", action="store_true", help="every rank projects the values of its context group")
    add("--workspace", type=memory_size, metavar="SIZE", help="scratch of the attention operator (default: not known)")
    add("--reserve", type=memory_size, default=memory_size("2GiB"), metavar="SIZE", help="kept free (default 2GiB)")
    add("--json", action="store_true", help="print all of it as JSON, in bytes")


def plan(options: argparse.Namespace) -> int:
    """Run `mla-fx plan`; 1 where it does not fit."""
    found = _Found.of(options)
    print(json.dumps(found.values, indent=2) if options.json else "\n".join(found.lines()))
    return 0 if found.values["fits"] else 1


@frozen
class _Found:
    """A plan beside the memory of a device, and the same as values for JSON."""

    plan: Plan
    memory: int
    name: str
    workspace_known: bool

    @classmethod
    def of(cls, options: argparse.Namespace) -> "_Found":
        from mla_fx.cli import chosen_orchestration  # which imports this module

        config = models.load_config(options.model) if options.model else models.deepseek_v3_config()
        limit = config.max_position_embeddings
        if options.context is not None and limit is not None and options.context > limit:
            raise InputError(f"--context: must be at most max_position_embeddings, {limit}: got {options.context}")
        shape = StepShape(
            ranks=Layout.parse(options.layout),
            requests=options.requests,
            block_size=options.block_size,
            dtype=options.dtype,
            quantization=options.quantization,
            replicate_query=options.replicate_query,
            project_before_merge=options.project_before_merge,
        )
        made = Plan(
            config=config,
            shape=shape,
            context=options.context or min(8192, limit or 8192),
            chunk=options.chunk,
            drafts=options.drafts,
            workspace=options.workspace or 0,
            reserve=options.reserve,
            orchestration=chosen_orchestration(options.orchestration),
        )
        return cls(
            made, options.device_memory, options.model or "DeepSeek-V3 as published", options.workspace is not None
        )

    @property
    def held(self) -> dict[str, int]:
        """Bytes on each rank, by what they are of; in all, the total."""
        plan = self.plan
        rest = {"cache": plan.cache, "values": plan.values, "staging": plan.staging}
        return {**plan.weights, **rest, "workspace": plan.workspace, "reserve": plan.reserve}

    @property
    def values(self) -> dict[str, Any]:
        """What is printed as JSON: bytes are those of each rank, and all ranks hold as much."""
        plan, layout = self.plan, self.plan.shape.layout
        return {
            "model": self.name,
            "layout": {name: getattr(layout, name) for name in ("tp", "dcp", "dp", "ep")},
            "devices": layout.size,
            "device_memory": self.memory,
            "requests": plan.shape.requests,
            "context": plan.context,
            "held": self.held,
            "workspace_known": self.workspace_known,
            "total": plan.total,
            "fits": plan.total <= self.memory,
            "largest_context": largest_context(plan, self.memory),
            "max_position_embeddings": plan.config.max_position_embeddings,
            "most_requests": most_requests(plan, self.memory),
            "sent": plan.sent,
            "beside": [self._difference(other) for other in others(plan)],
        }

    def _difference(self, other: Plan) -> dict[str, Any]:
        """What this plan has more than another one, in bytes of a rank; less where it is below 0."""
        mine = self.plan
        return {
            "layout": str(other.shape.layout),
            "requests": other.shape.requests,
            "weights": sum(mine.weights.values()) - sum(other.weights.values()),
            "cache": mine.cache - other.cache,
            "values": mine.values - other.values,
            "sent": mine.sent - other.sent,
        }

    def lines(self) -> Iterator[str]:
        """The same in words and GiB."""
        plan, found, shape = self.plan, self.values, self.plan.shape
        yield _title(self.name, plan.config)
        yield f"{shape.layout}: {found['devices']} devices of {_gib(self.memory)}; {shape.quantization or shape.dtype}"
        yield f"each replica has {shape.requests} requests of {plan.context:,} tokens, and {plan.tokens} tokens a step"
        yield "every rank holds as much, in bytes and GiB; what does not divide is padded:"
        for kind, size in found["held"].items():
            if kind != "workspace" or self.workspace_known:
                yield f"  {_line(kind, size)}{_note(kind, plan)}"
        if not self.workspace_known:
            yield f"  {'workspace':<24}{'?':>17}  not known without the device, and not counted: --workspace says it"
        yield f"  {_line('in all', found['total'])}"
        over = found["total"] - self.memory
        yield f"it fits, with {_gib(-over)} to spare" if over <= 0 else f"it does not fit: {_gib(over)} too much"
        yield from self._most(found)
        yield f"a step in which all requests decode sends {found['sent']:,} bytes from each rank"
        for other in found["beside"]:
            parts = [f"{name} {_signed(other[name])}" for name in ("weights", "cache", "values", "sent")]
            yield f"beside {other['layout']} with {other['requests']} requests a replica: {', '.join(parts)}"

    def _most(self, found: dict[str, Any]) -> Iterator[str]:
        """The longest context and the most requests."""
        shape, plan, limit = self.plan.shape, self.plan, found["max_position_embeddings"]
        longest, most = found["largest_context"], found["most_requests"]
        more = f"; the model takes {limit:,}" if limit is not None and longest > limit else ""
        yield f"largest context of {shape.requests} requests a replica: {longest:,} tokens each{more}"
        yield f"most requests of {plan.context:,} tokens: {most:,} a replica, {most * shape.layout.dp:,} in all"


def others(plan: Plan) -> Iterator[Plan]:
    """The layouts to hold one against: the sequence over all ranks of a replica, and one replica of all ranks.

    Both for as many requests in all, and where the heads can be shared out so.
    """
    layout, heads = plan.shape.layout, plan.config.attention.num_attention_heads
    if layout.dcp < layout.tp:
        yield evolve(plan, shape=evolve(plan.shape, ranks=Layout(tp=layout.tp, dp=layout.dp)))
    if layout.dp > 1 and heads % layout.size == 0:
        one = Layout(tp=layout.size, dcp=layout.dcp)
        yield evolve(plan, shape=evolve(plan.shape, ranks=one, requests=plan.shape.requests * layout.dp))


def _note(kind: str, plan: Plan) -> str:
    """What is to be known of a kind, behind its bytes."""
    layout = plan.shape.layout
    copies, dp = layout.tp // layout.dcp, layout.dp
    if kind == "cache" and copies > 1:
        return f"  each position on {copies} ranks of a replica, tp / dcp"
    if kind == "experts" or dp == 1 or kind not in plan.weights:
        return ""
    return f"  in each of {dp} replicas"


def _title(name: str, config: models.ModelConfig) -> str:
    attention = config.attention
    return (
        f"{name}: {config.num_hidden_layers} layers, {attention.num_attention_heads} heads, "
        f"latent {attention.kv_lora_rank}"
    )


def _line(kind: str, size: int) -> str:
    return f"{kind:<24}{size:>17,}{size / _GIB:>10,.3f}"


def _gib(size: int) -> str:
    return f"{size / _GIB:,.3f} GiB"


def _signed(size: int) -> str:
    return f"{size:+,} bytes"
