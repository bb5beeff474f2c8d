"""A tape of random draws: it records them, or replaces them by the concatenated draws of several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ddp_doctor.probes.flows import DrawFlow
from ddp_doctor.torch_internals import DispatchMode

_DROPOUT = "aten::native_dropout"
_PERMUTATION = "aten::randperm"


class Draw(NamedTuple):
    """The results of an operator that draws random numbers."""

    name: str
    outputs: list[torch.Tensor]


class RandomReplay(DispatchMode):
    """Sees each operator that draws from a torch generator while it is entered.

    Attributes:
        draws: The recorded draws.
        most: Most values of one draw from torch's global generator.
        recording: Whether the draws are kept.
        reverse: Whether the samples of the batches are reversed, and so the draws.
        failures: Why draws could not be replaced, in plain words.
        flow: Follows the draws, or None.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: list[Draw] = []
        self.most = 0
        self.recording = False
        self.failures: list[str] = []
        self._ranks: Sequence[Sequence[Draw]] | None = None
        self._position = 0
        self.reverse = False
        self.flow: DrawFlow | None = None

    def replay(self, ranks: Sequence[Sequence[Draw]] | None) -> None:
        """Replaces the next draws by those of the ranks, concatenated."""
        self._ranks, self._position = ranks, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator; if it draws random numbers, records or replaces them."""
        may_draw = torch.Tag.nondeterministic_seeded in func.tags
        if not may_draw and self.flow is None:
            return func(*args, **(kwargs or {}))
        private = (kwargs or {}).get("generator") is not None or any(isinstance(arg, torch.Generator) for arg in args)
        before = torch.default_generator.get_state() if may_draw else None
        result = func(*args, **(kwargs or {}))
        # Attention without dropout is marked as an operator that draws, but does not; whether a program takes it may
        # depend on the masks of a batch.
        draws = before is not None and (private or _may_have_changed(before))
        name = func._schema.name
        parts = result if isinstance(result, tuple | list) else (result,)
        outputs = [out for out in parts if isinstance(out, torch.Tensor)]
        if self.flow is not None:
            self.flow.see(name, args, kwargs, outputs, drew=draws and not private)
        if not draws:
            return result
        if not private:
            self.most = max([self.most, *(out.numel() for out in outputs)])
        if self._ranks is not None:
            if reason := self._replace(name, outputs):
                self.failures.append(f"{name}: {reason}")
            elif name == _DROPOUT:
                outputs[0].copy_(args[0] * outputs[1] / (1 - args[1]))
        elif self.recording:
            self.draws.append(Draw(name, [out.detach().clone() for out in outputs]))
        return result

    def _replace(self, name: str, outputs: list[torch.Tensor]) -> str:
        """Copies the ranks' draws into the outputs; returns why it cannot, or nothing."""
        assert self._ranks is not None
        if any(self._position >= len(draws) for draws in self._ranks):
            return "one process draws more often than the ranks"
        parts = [draws[self._position] for draws in self._ranks]
        self._position += 1
        if any(part.name != name for part in parts):
            return "one process draws in another order than the ranks"
        # The first output of dropout is computed from its mask.
        for place in range(1 if name == _DROPOUT else 0, len(outputs)):
            drawn = [part.outputs[place] for part in parts]
            whole = outputs[place]
            if name == _PERMUTATION:
                # Each rank permutes its own samples.
                starts = [sum(len(part) for part in drawn[:number]) for number in range(len(drawn))]
                drawn = [part + start for part, start in zip(drawn, starts, strict=True)]
            if all(torch.equal(part, drawn[0]) for part in drawn) and drawn[0].shape == whole.shape:
                whole.copy_(drawn[0])
            elif (axis := joining_axis(drawn, whole)) is not None:
                joined = torch.cat(drawn, axis)
                whole.copy_(joined.flip(axis) if self.reverse else joined)
            else:
                return f"draws of the shape {tuple(drawn[0].shape)} on each rank are not part of {tuple(whole.shape)}"
        return ""


def _may_have_changed(before: torch.Tensor) -> bool:
    """Returns whether the CPU's generator was used since this state; with real GPUs, that is not known."""
    return bool(torch.cuda.default_generators) or not torch.equal(before, torch.default_generator.get_state())


def joining_axis(parts: Sequence[torch.Tensor], whole: torch.Tensor) -> int | None:
    """Returns the dimension along which the parts have the shape of the whole; None if there is none."""
    if any(part.ndim != whole.ndim for part in parts):
        return None
    for axis in range(whole.ndim):
        rest = whole.shape[:axis] + whole.shape[axis + 1 :]
        if sum(part.shape[axis] for part in parts) == whole.shape[axis] and all(
            part.shape[:axis] + part.shape[axis + 1 :] == rest for part in parts
        ):
            return axis
    return None
