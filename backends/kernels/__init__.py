"""Kernels in Triton for what goes around the exchange, for every backend whose device Triton compiles for.

    with_kernels(table)    the table with the exchange laid out by one launch and merged by one

Written once, for Triton (NVIDIA GPUs) and triton-ascend (NPUs): both install the
package `triton`, without which the rules of the table stay as they are.  They
have run in Triton's interpreter only, which plays a kernel on the host; on no
GPU and no NPU.  Importing this does not import triton.
"""

if __name__ != "mla_fx.backends.kernels":  # reached as a top-level name from the checkout
    raise ImportError(f"import this package as 'mla_fx.backends.kernels', not {__name__!r}")

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import torch

from mla_fx.backends.device import Run
from mla_fx.backends.kernels import rules
from mla_fx.backends.table import Collective, Rule, Table
from mla_fx.effects import Op, ops


def available() -> bool:
    """Whether there is a triton to compile kernels with."""
    return find_spec("triton") is not None


def with_kernels(table: Table, merges: Iterable[type[Op]] = ()) -> Table:
    """The table with kernels for `ops.AllToAll` and `ops.Combine`, one launch each.

    `merges` are fused ops of the table that take what `ops.Combine` takes, and give what it gives: they merge so, too.
    What the table's own rules do in float64 they go on to do, since triton-ascend has no float64.
    """
    exchange, own = table.rules[ops.AllToAll], table.rules[ops.Combine]
    assert isinstance(exchange, Collective) and not isinstance(own, Collective)
    merging: dict[type[Op], Rule | Collective] = dict.fromkeys((ops.Combine, *merges), _but_in_float64(own))
    return table.with_rules({ops.AllToAll: Collective(rules.send, exchange.receive), **merging})


def _but_in_float64(own: Rule) -> Rule:
    def combine(
        recv: torch.Tensor, recv_lse: torch.Tensor, local: torch.Tensor, local_lse: torch.Tensor, *, run: Run
    ) -> Any:
        rule = own if local.dtype == torch.float64 else rules.combine
        return rule(recv, recv_lse, local, local_lse, run=run)

    return combine
