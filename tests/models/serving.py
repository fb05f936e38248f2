"""What a rank of a group of processes serves in a test: functions of a member, run by `tests.processes`."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, frozen

from mla_fx import StepShape, backends
from mla_fx.backends import PeerError, RunError
from mla_fx.effects import InputError, ops
from mla_fx.layout import Layout
from mla_fx.models import Checkpoint, Engine, MtpDrafter, Request, Runner, Sampling
from mla_fx.models.runner import Piece
from tests.models.served import run
from tests.processes import Member


@frozen(kw_only=True)
class Served:
    """What is served, and how: each prompt with the next sampling."""

    directory: Path
    layout: Layout
    prompts: Sequence[Sequence[int]]
    count: int = 8
    sampling: Sequence[Sampling] = (Sampling(),)
    backend: str = "cpu"
    dtype: str = "fp32"
    chunk: int = 8
    requests: int = 2
    blocks: int = 64
    block_size: int = 4
    drafts: int = 0
    quantization: str | None = None

    def runner(self, **given: Any) -> Runner:
        """With `group`, this process's rank; else all ranks in this process."""
        shape = StepShape(
            ranks=self.layout,
            requests=self.requests,
            blocks=self.blocks,
            block_size=self.block_size,
            table_width=self.blocks,
            dtype=self.dtype,
            quantization=self.quantization,
        )
        backend = given.pop("wrapped", lambda made: made)(backends.get(self.backend, ranks=self.layout, **given))
        return Runner.load(Checkpoint.open(self.directory), backend, shape=shape, mtp=self.drafts > 0)

    def engine(self, runner: Runner) -> Engine:
        drafter = MtpDrafter(runner, self.drafts) if self.drafts else None
        return Engine(runner=runner, chunk=self.chunk, drafter=drafter)

    def asked(self, engine: Engine) -> list[Request]:
        return [
            engine.add(prompt, max_new_tokens=self.count, sampling=self.sampling[k % len(self.sampling)])
            for k, prompt in enumerate(self.prompts)
        ]

    def served(self, runner: Runner) -> list[list[int]]:
        """The text of each prompt."""
        engine = self.engine(runner)
        asked = self.asked(engine)
        for _ in run(engine):
            pass
        return [request.new_tokens for request in asked]


@define
class Watched:
    """A backend that keeps the logits of every step, of the first rank here; `off` is added to those of some ranks."""

    backend: backends.Backend
    logits: list[torch.Tensor]
    off: float = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def compile(self, program: Any, prepared: Any) -> Any:
        run = self.backend.compile(program, prepared)

        def watched(*arguments: Any) -> Any:
            logits, *rest = run(*arguments)
            noise = torch.Generator().manual_seed(self.backend.here.start)
            if self.off and self.backend.here.start:
                logits = [one + self.off * torch.randn(one.shape, generator=noise) for one in logits]
            self.logits.append(logits[0].cpu())
            return logits, *rest

        return watched


def texts(member: Member, *, kind: str, served: Served, off: float = 0.0) -> tuple[list[list[int]], list[torch.Tensor]]:
    """The texts as this rank knows them, and the logits of each step as this rank has them."""
    logits: list[torch.Tensor] = []
    group = member.join(kind)
    found = served.served(served.runner(group=group, wrapped=lambda made: Watched(made, logits, off)))
    return found, logits


def together(served: Served) -> tuple[list[list[int]], list[torch.Tensor]]:
    """The same in this process, with all ranks here; logits are those of rank 0."""
    logits: list[torch.Tensor] = []
    return served.served(served.runner(wrapped=lambda made: Watched(made, logits))), logits


def resumed(member: Member, *, served: Served, after: int) -> tuple[list[list[int]], str, list[int]]:
    """Texts of two groups: rank 1 fails in a step of the first, and all go on in the second.

    Also what was said of that in this rank, and how many tokens it had of each text.
    """
    calls = itertools.count()

    def failing(*operands: Any, run: Any, **given: Any) -> Any:
        if run.number == 1 and next(calls) == after:
            raise ArithmeticError("planted")
        return rule(*operands, run=run, **given)

    def wrapped(backend: Any) -> Any:
        nonlocal rule
        rule = backend.table.rules[ops.TakeRows]
        return backend.with_rules({ops.TakeRows: failing})

    rule: Any = None
    engine = served.engine(served.runner(group=member.join("gloo"), wrapped=wrapped))
    served.asked(engine)
    said, requests = "", {}
    try:
        for output in run(engine):
            requests[output.request.number] = output.request
    except (PeerError, RunError) as error:
        said = str(error)
    snapshot = engine.snapshot()
    had = [len(one["new_tokens"]) for one in snapshot["requests"]]
    dist.destroy_process_group()
    engine = served.engine(served.runner(group=member.join("gloo", again=1)))
    requests |= {request.number: request for request in engine.restore(snapshot)}
    for _ in run(engine):
        pass
    return [requests[number].new_tokens for number in sorted(requests)], said, had


def refusals(member: Member, *, served: Served) -> tuple[list[str], list[int]]:
    """What is said of batches that one of two replicas refuses, and then how many rows a good one gives of each."""
    runner = served.runner(group=member.join("gloo"))
    good = Piece(tokens=[1], start=0, table=[0])
    said = []
    for bad in (Piece(tokens=[64], start=0, table=[0]), Piece(tokens=[1], start=0, table=[])):
        try:
            runner.forward([[good], [bad]], [[0], [0]], filling=False)
        except InputError as error:
            said.append(str(error))
    logits, _ = runner.forward([[good], [good]], [[0], [0]], filling=False)
    return said, runner.decided([None if one is None else len(one) for one in logits])
