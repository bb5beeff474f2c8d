"""Probe of the state that changes in training, and of what the program saves of it."""

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

    def before_step(self) -> None:
        """Records digests of the state in the first steps, and after a restart."""
        trained = self._trained()
        if self._surveys < self._most and trained and sum(value.numel() for value in trained) <= _LARGE:
            self._surveys += 1
            self.recorder.add("state", **self._survey(trained))

    def saved(self, content: Any) -> dict[str, Any]:
        """Returns what a saved value contains, and what it lacks."""
        tensors, optimizers = set[str](), 0
        for value in _walk(content):
            if isinstance(value, torch.Tensor) and len(tensors) < _MOST_SAVED and value.numel() <= _LARGE:
                tensors.add(digest(value))
            optimizers += isinstance(value, dict) and {"state", "param_groups"} <= value.keys()
        trained, events = self._trained(), self.recorder.events
        if sum(value.numel() for value in trained) > _LARGE:
            return {}
        # One that has not stepped since the save before may be that of an earlier part of the program.
        saves = {event["step"] for event in events if event["kind"] == "saved"} - {self.recorder.step}
        steps = [event for event in events if event["kind"] == "step" and event["step"] >= max(saves, default=0)]
        stateful = sum(bool(self.optimizers[number].state) for number in {event["optimizer"] for event in steps})
        return {"tensors": sorted(tensors), "optimizers": optimizers, "stateful": stateful, **self._survey(trained)}

    def _survey(self, trained: list[torch.Tensor]) -> dict[str, Any]:
        """Returns digests of the weights, of copies of them, and of the state of each optimizer that has one."""
        copies = {
            id(owner): (type(owner).__name__, tuple(map(digest, values)))
            for owner, values in _copies(trained, self.optimizers, self.others)
        }
        states = [
            digest([owner.state.get(value, {}) for group in owner.param_groups for value in group["params"]])
            if owner.state
            else ""
            for owner in self.optimizers
        ]
        return {"weights": list(map(digest, trained)), "states": states, "copies": copies}

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
) -> list[tuple[Any, list[torch.Tensor]]]:
    """Returns the modules, dictionaries and lists that hold tensors of the weights' shapes, but not the weights."""
    known = {id(value) for value in trained} | {id(value.grad) for value in trained}
    known |= {id(part) for owner in optimizers for state in owner.state.values() for part in state.values()}
    shapes = Counter(value.shape for value in trained)
    found: list[tuple[Any, list[torch.Tensor]]] = []
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
            found.append((owner, list(tensors)))
    return found
