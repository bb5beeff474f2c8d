"""CUDA graphs: a capture records the operators, and a replay runs them again on the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddp_doctor.emulation.torch_internals import DispatchMode, optimizer_hooks


class _Tape(DispatchMode):
    """Records the operators, and remembers what they change.

    Attributes:
        calls: What a replay calls, in order.
        before: The tensors that existed before the capture and were changed, with their values.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Callable[[], object]] = []
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator, and records it."""
        kwargs = kwargs or {}
        written = [*_written(func, args, kwargs)]
        for tensor in written:
            if tensor.untyped_storage().data_ptr() not in self._storages:
                self._storages.add(tensor.untyped_storage().data_ptr())
                self.before.append((tensor, tensor.detach().clone()))
        result = func(*args, **kwargs)
        outputs = [out for out in (result if isinstance(result, tuple | list) else (result,)) if _is_tensor(out)]
        inputs = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        made = [out for out in outputs if out.untyped_storage().data_ptr() not in inputs]
        # What the capture itself makes needs no restoring.
        self._storages |= {out.untyped_storage().data_ptr() for out in made}
        if made or written or not outputs:
            self.calls.append(lambda: _again(func, args, kwargs, outputs, made))
        return result


def _again(func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor], made: list[torch.Tensor]) -> None:
    """Runs an operator again, and writes its results where the first ones are."""
    result = func(*args, **kwargs)
    new = [out for out in (result if isinstance(result, tuple | list) else (result,)) if _is_tensor(out)]
    for old, out in zip(outputs, new, strict=True):
        if any(old is one for one in made):
            old.copy_(out)


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Returns the arguments that an operator writes to."""
    arguments = func._schema.arguments
    named = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    marked = {argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write}
    return _tensors([named[name] for name in marked if name in named])


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in _tensors(part)]
    return [value] if _is_tensor(value) else []


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


class CUDAGraph:
    """A recorded graph. The capture leaves all tensors as they were; a replay runs the hooks of the optimizers.

    Attributes:
        capturing: The graph that is being captured, or None.
    """

    capturing: ClassVar[CUDAGraph | None] = None

    def __init__(self, keep_graph: bool = False) -> None:
        self._tape = _Tape()
        self._hooks: list[Any] = []

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        """Begins the capture."""
        tape, CUDAGraph.capturing = self._tape, self
        self._hooks = [
            register(lambda optimizer, *_, _first=first: tape.calls.append(lambda: _hooks(optimizer, _first)))
            for register, first in (
                (register_optimizer_step_pre_hook, True),
                (register_optimizer_step_post_hook, False),
            )
        ]
        tape.__enter__()  # type: ignore[no-untyped-call]

    def capture_end(self) -> None:
        """Ends the capture, and restores what it changed."""
        CUDAGraph.capturing = None
        self._tape.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()
        with torch.no_grad():
            for tensor, value in self._tape.before:
                tensor.copy_(value)
        self._tape.before.clear()

    def replay(self) -> None:
        """Runs the captured operators on the same tensors."""
        with torch.no_grad():
            for call in self._tape.calls:
                call()

    def reset(self) -> None:
        """Forgets the capture."""
        self._tape = _Tape()

    def pool(self) -> tuple[int, int]:
        """Returns the identifier of the memory pool."""
        return (0, 0)


def _hooks(optimizer: Any, first: bool) -> None:
    # As in a step, the hooks of the capture itself have been removed.
    with torch.enable_grad():
        optimizer_hooks(optimizer, before=first)


class graph:  # noqa: N801
    """The context `torch.cuda.graph`."""

    def __init__(self, cuda_graph: CUDAGraph, *args: Any, **kwargs: Any) -> None:
        self.cuda_graph = cuda_graph

    def __enter__(self) -> None:
        self.cuda_graph.capture_begin()

    def __exit__(self, *error: Any) -> None:
        self.cuda_graph.capture_end()


def make_graphed_callables(callables: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns the callables as they are: a replay is a call."""
    return callables
