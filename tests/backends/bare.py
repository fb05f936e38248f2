"""A rule on tensors without data: what it returns, and every operator that it calls on the way."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mla_fx.backends import Collective, Device, InProcess, Rule, Run
from mla_fx.backends.table import Form
from mla_fx.effects import Op
from tests.backends.sizes import Case
from tests.ops.conftest import fields

#: Operators that hand a number or a number of rows to the host, so that it waits for the device.
WAITING = {
    "_local_scalar_dense",
    "bincount",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "nonzero_static",
    "unique_consecutive",
    "_unique",
    "_unique2",
    "unique_dim",
}


class WaitError(AssertionError):
    """A rule waits for the device."""


class Watch(TorchDispatchMode):
    """Notes what is called, refuses what waits for the device, and tensors that are made elsewhere than on `device`."""

    def __init__(self, device: str | None = "meta") -> None:
        super().__init__()
        self.device, self.called = device, list[str]()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled around it, so torch's compiler need not be loaded to be kept out."""
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = function._schema.name.split("::")[1]
        self.called.append(f"{function._schema.name}.{function._overloadname}")
        masks = [
            t for t in tree_leaves(args[1:]) if isinstance(t, torch.Tensor) and t.dtype in (torch.bool, torch.uint8)
        ]
        if name in WAITING or (name in ("index", "index_put", "index_put_") and masks):
            raise WaitError(f"{name} waits for the device")
        if name == "repeat_interleave" and (kwargs or {}).get("output_size") is None:
            raise WaitError(f"{name} without a size waits for the device")
        results = self.answer(function, *args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor) and self.device not in (None, tensor.device.type):
                raise WaitError(f"{name} makes a tensor on {tensor.device}")
        return results

    def answer(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """What a call returns."""
        return function(*args, **kwargs)


def ask(
    rule: Rule | Collective, case: Case, *, ranks: int, device: Device, forms: Mapping[str, Form] | None = None
) -> list[tuple[torch.Tensor, ...]]:
    """The rule's results, asked as a body asks: a collective of every rank, any other of the last one by itself."""
    op: Op = case.op
    operands = [
        (forms or {}).get(name, lambda x: x)(x) for name, x in zip(op.operands, case.operands(device.kind), strict=True)
    ]
    if not isinstance(rule, Collective):
        return [rule(*operands, run=Run(ranks - 1, device), **fields(op))]
    assert op.communicates
    runs = [Run(rank, device) for rank in range(ranks)]
    sent = [rule.send(*operands, run=run, **fields(op)) for run in runs]
    moved = InProcess(ranks).move(op.communicates, sent, group="tp")
    return [rule.receive(mine, *operands, run=run, **fields(op)) for mine, run in zip(moved, runs, strict=True)]
