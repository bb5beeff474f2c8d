"""Probe of the state that changes in training, and of what the program saves of it."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ddp_doctor.records.recorder import Recorder, digest
from ddp_doctor.records.spec import Spec

# Larger models are not digested again and again.
_LARGE = 5_000_000
_MOST_SAVED = 20_000
_MOST_SURVEYS, _DEEPEST = 4, 6


class StateProbe:
    """Records copies of the weights beside the optimizers, such as averages, and whether they are saved."""

    def __init__(self, recorder: Recorder, spec: Spec) -> None:
        self.recorder, self.spec = recorder, spec
        self.optimizers: list[Optimizer] = []
        # What the doctor records is no state of the program.
        self.others: list[Any] = [recorder.tensors]
        # Repetitions with interventions need none.
        self._most = 2 if spec.continues else 0 if spec.interventions else _MOST_SURVEYS
        self._surveys = 0
        # The last step of each optimizer, and the last two steps after which the program has saved something.
        self._stepped: dict[int, int] = {}
        self._saves = [-1, -1]

    def before_step(self, optimizer: Optimizer) -> None:
        """Records digests of the averages in the first steps, or of all state after a restart."""
        self._stepped[id(optimizer)] = self.recorder.step
        trained = self._trained()
        if self._surveys < self._most and trained and sum(value.numel() for value in trained) <= _LARGE:
            self._surveys += 1
            copies = _copies(trained, self.optimizers, self.others)
            if self.spec.continues:
                values = {str(id(owner)): [digest(value) for value in tensors] for owner, _, tensors in copies}
                weights = [digest(value) for value in trained]
                self.recorder.add("continued", weights=weights, states=self._states(), copies=values)
            else:
                found = {str(id(owner)): digest(tensors) for owner, _, tensors in copies}
                self.recorder.add("copies", digests=found)

    def saved(self, content: Any) -> dict[str, Any]:
        """Returns what a saved value contains, and what it lacks."""
        tensors, optimizers = set[str](), 0
        for value in _walk(content):
            if isinstance(value, torch.Tensor) and len(tensors) < _MOST_SAVED and value.numel() <= _LARGE:
                tensors.add(digest(value))
            optimizers += isinstance(value, dict) and {"state", "param_groups"} <= value.keys()
        trained = self._trained()
        if self._saves[1] != self.recorder.step:
            self._saves = [self._saves[1], self.recorder.step]
        if sum(value.numel() for value in trained) > _LARGE:
            return {}
        # One that has not stepped since the save before may be that of an earlier part of the program.
        used = [owner for owner in self.optimizers if self._stepped.get(id(owner), -1) >= self._saves[0]]
        copies = [
            {"id": str(id(owner)), "name": name, "digests": [digest(value) for value in values]}
            for owner, name, values in _copies(trained, self.optimizers, self.others)
        ]
        return {
            "tensors": sorted(tensors),
            "optimizers": optimizers,
            "weights": [digest(value) for value in trained],
            "states": self._states(),
            "copies": copies,
            "stateful": sum(bool(optimizer.state) for optimizer in used),
        }

    def _states(self) -> list[str]:
        """Returns a digest of the state of each optimizer, which is empty if it has none."""
        return [
            digest([owner.state.get(value, {}) for group in owner.param_groups for value in group["params"]])
            if owner.state
            else ""
            for owner in self.optimizers
        ]

    def _trained(self) -> list[torch.Tensor]:
        return [value for owner in self.optimizers for group in owner.param_groups for value in group["params"]]


def _walk(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yields the parts of a nested value."""
    yield value
    parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    for part in parts[:_MOST_SAVED] if depth <= _DEEPEST else ():
        yield from _walk(part, depth + 1)


def _copies(
    trained: list[torch.Tensor], optimizers: list[Optimizer], others: list[Any]
) -> list[tuple[Any, str, list[torch.Tensor]]]:
    """Returns the modules, dictionaries and lists that hold tensors of the weights' shapes, but not the weights."""
    known = {id(value) for value in trained} | {id(value.grad) for value in trained}
    known |= {id(part) for owner in optimizers for state in owner.state.values() for part in state.values()}
    shapes = Counter(value.shape for value in trained)
    found: list[tuple[Any, str, list[torch.Tensor]]] = []
    objects = gc.get_objects()
    # Not isinstance, which asks the object: proxies and deprecated objects answer with warnings and imports.
    modules = [value for value in objects if issubclass(type(value), nn.Module)] if shapes else []
    inner = {id(child) for module in modules for child in module.children()}
    covered = {id(part) for module in modules for part in vars(module).values()} | {id(other) for other in others}
    for owner in objects if shapes else ():
        tensors: list[Any] = []
        if issubclass(type(owner), nn.Module):
            tensors = [] if id(owner) in inner else list(owner.parameters())
        elif type(owner) in {dict, list} and 1 <= len(owner) / len(trained) <= 2 and id(owner) not in covered:
            parts = list(owner.values()) if isinstance(owner, dict) else owner
            tensors = parts if all(type(part) is torch.Tensor for part in parts) else []
        if not tensors or shapes - Counter(value.shape for value in tensors):
            continue
        if not any(id(value) in known for value in tensors):
            found.append((owner, type(owner).__name__, list(tensors)))
    return found
