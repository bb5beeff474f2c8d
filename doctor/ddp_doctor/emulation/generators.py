"""The generator of an emulated GPU: what is drawn on the GPU does not change the generator of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ddp_doctor.emulation.devices import gpus, replaced

_Generator = type(torch.default_generator)
# Equal seeds give other numbers on a GPU than on the CPU.
_MASK = 0x5DEECE66D


class GpuGenerator:
    """The state of the GPU's generator, which is that of torch's global one while the GPU computes."""

    def __init__(self) -> None:
        self._own = _Generator()
        self.inside = False
        self._seed = 0

    def seed(self, seed: int) -> None:
        """Begins again with a seed."""
        self._seed = int(seed)
        (torch.default_generator if self.inside else self._own).manual_seed((self._seed ^ _MASK) & (2**63 - 1))

    def initial_seed(self) -> int:
        """Returns the seed."""
        return self._seed

    def state(self) -> torch.Tensor:
        """Returns the state."""
        return (torch.default_generator if self.inside else self._own).get_state()

    def set_state(self, state: torch.Tensor) -> None:
        """Continues with a state."""
        (torch.default_generator if self.inside else self._own).set_state(state)

    @contextmanager
    def entered(self, enters: bool) -> Iterator[None]:
        """Lets everything draw from the GPU's generator, if it enters."""
        if not enters or self.inside:
            yield
            return
        cpu = torch.default_generator.get_state()
        torch.default_generator.set_state(self._own.get_state())
        self.inside = True
        try:
            yield
        finally:
            self.inside = False
            self._own.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(cpu)


gpu_generator = GpuGenerator()


def install_module_draws() -> None:
    """Lets a module on a GPU draw from the generator of the GPU."""
    replaced(nn.Module, "__call__", _call)


def _call(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not gpus.used or gpu_generator.inside:
            return original(self, *args, **kwargs)
        first = next(self.parameters(), None)
        with gpu_generator.entered(first is not None and gpus.of(first).type == "cuda"):
            return original(self, *args, **kwargs)

    return call
