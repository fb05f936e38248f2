"""Kernels of the exchange on the emulated NPU: a launch is one operator on its stream, which the interpreter plays."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen

from mla_fx.backends.ascend.emulator import Machine
from tests.backends.kernels.interpreter import interpreted

#: How many of a kernel's first arguments it reads, and how many behind them it writes.
TENSORS = {"pack": (2, 2), "merge": (4, 1)}


@frozen
class Launched:
    """A kernel that is launched on the emulated device: `kernel[grid](...)`, as Triton has it."""

    machine: Machine
    name: str
    kernel: Any
    played: bool

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        read, written = TENSORS[self.name]

        def launch(*arguments: Any, **constants: Any) -> None:
            tensors, numbers = arguments[: read + written], arguments[read + written :]
            assert all(isinstance(x, torch.Tensor) for x in tensors) and not any(map(torch.is_tensor, numbers))

            def play(*found: torch.Tensor) -> None:
                if self.played:
                    self.kernel[grid](*found, *numbers, **constants)

            self.machine.launch(self.name, play, tensors[:read], tensors[read:])

        return launch


@contextmanager
def launched(machine: Machine, *, played: bool = True) -> Iterator[None]:
    """With the kernels of the exchange launched on the emulated device; not `played`, they write nothing."""
    with interpreted():
        from mla_fx.backends.kernels import exchange

        kernels = {name: getattr(exchange, name) for name in TENSORS}
        for name, kernel in kernels.items():
            setattr(exchange, name, Launched(machine, name, kernel, played))
        try:
            yield
        finally:
            machine.synchronize()
