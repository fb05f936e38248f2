"""Collectives of a group of processes, one rank in each, through torch.distributed: the same rules for every device.

    dist.init_process_group("hccl")                                     # "gloo" for `cpu` and `reference`
    backend = backends.get("ascend", ranks=dist.get_world_size(), group=dist.group.WORLD)
    run = backend.compile(program)                                      # the program of all ranks, unchanged
    (hidden,), (cache,) = run([params], [cache], [hidden], [batch])     # this rank's

A rule takes this rank's operands and the group, and returns this rank's results.
On a device it issues on the stream that is current.  The group's collectives
run on a stream of their own, which waits for the current one and for which the
current one waits before it goes on; operands and results are kept for that
stream by the group.  So to a program a collective is a launch on the stream
that the program says, and what it orders behind the launch is behind the
collective.  The host waits for nothing.

What only moves goes as bytes: no transport may take a NaN or a subnormal for a
number, and a group takes bytes whatever its backend.  A step without tokens
moves nothing, on no rank, so nothing is called.

"hccl" was run over the emulated HCCL (`mla_fx.backends.ascend.emulator`), on no
NPU so far; "gloo" on the host.
"""

if __name__ != "mla_fx.backends.distributed":  # reached as a top-level name from the checkout
    raise ImportError(f"import this package as 'mla_fx.backends.distributed', not {__name__!r}")

from collections.abc import Mapping
from typing import Final

from mla_fx.backends.backend import Rule, rules_of
from mla_fx.effects import Op, ops

#: Op to rule, for the ops that communicate.
RULES: Final[Mapping[type[Op], Rule]] = rules_of(__name__, (op for op in ops.ALL if op.communicates))
