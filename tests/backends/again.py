"""For torchrun: steps on two ranks, of which one is killed in the middle of a step the first time round."""

import os
import signal
import sys

from mla_fx import backends
from mla_fx.effects import ops, schedule
from mla_fx.orchestrations import attention_aside
from tests.backends.ascend.steps import setup

kind, name = sys.argv[1:]
if kind == "hccl":
    from mla_fx.backends.ascend.emulator import emulate

    emulate()
with backends.join(kind, timeout=5) as group:
    rank = group.rank()
    backend = backends.get(name, ranks=2, group=group)
    given = setup("bf16", ranks=2)
    if rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        meet = backend.table.rules[ops.AllToAll]
        backend = backend.with_rules(
            {ops.AllToAll: backends.Collective(lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL), meet.receive)}
        )
    run = given.compiled(backend, schedule(given.step, attention_aside))
    out, _ = run(*backend.put([[argument[rank]] for argument in given.arguments()]))
    with backend.reading():
        total = out[0].float().abs().sum().item()
    said = backend.share(total)
    if rank == 0:
        assert said[0] == said[1]
        print(f"finished with {total > 0} in round {os.environ['TORCHELASTIC_RESTART_COUNT']}")
