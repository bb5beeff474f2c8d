"""Probe of the gradients that a rank computes for each parameter, before and after they are averaged."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch

from ddp_doctor.records.recorder import Recorder, digest
from ddp_doctor.records.spec import Spec

# The gradients of more backward passes per step are not recorded one by one.
_MOST_PARTS = 16
# Of more values without an optimizer, one parameter is followed.
_LARGE = 5_000_000


class GradientProbe:
    """Observes the gradients of parameters.

    Attributes:
        local: Sums of the gradients of this rank since the last step, by the identity of the parameter.
        micro: The gradient of each backward pass with its number, by the identity of the parameter.
        stale: Identities of parameters whose gradient of an earlier step was still there.
        passes: Number of backward passes since the last step.
    """

    def __init__(self, recorder: Recorder, spec: Spec) -> None:
        self.recorder, self.spec = recorder, spec
        self.local: dict[int, torch.Tensor] = {}
        self.micro: dict[int, list[tuple[int, torch.Tensor]]] = {}
        self.stale: set[int] = set()
        self.passes = 0
        self.weights = [float(weight) for weight in spec.interventions.get("weights", ())]
        self._hooked: dict[int, torch.Tensor] = {}
        self._applied, self._reached = set[int](), set[int]()

    def forget(self) -> None:
        """Forgets the gradients so far."""
        for known in (self.local, self.micro, self.stale, self._applied, self._reached):
            known.clear()

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Records the gradients that this rank computes for the parameters."""
        for parameter in parameters:
            if id(parameter) not in self._hooked and parameter.requires_grad and parameter.is_leaf:
                # The reference keeps the identity from being used again.
                self._hooked[id(parameter)] = parameter
                parameter.register_hook(functools.partial(self._on_gradient, parameter))

    def keep(self, key: str, parameter: torch.Tensor) -> None:
        """Records the gradients of a parameter in the current step: of this rank, and of each backward pass."""
        step = self.recorder.step
        if id(parameter) in self.local:
            self.recorder.keep(f"local/{step}/{key}", self.local[id(parameter)])
        parts = self.micro.get(id(parameter), ())
        for micro, part in parts if 1 < len(parts) <= _MOST_PARTS else ():
            self.recorder.keep(f"micro{micro}/{step}/{key}", part)

    def step(self, parameters: Iterable[torch.Tensor]) -> None:
        """Begins the next step of the parameters that an optimizer applies now."""
        for parameter in parameters:
            self.local.pop(id(parameter), None)
            self.micro.pop(id(parameter), None)
            self.stale.discard(id(parameter))
            if parameter.grad is not None:
                self._applied.add(id(parameter))
        self.passes = 0

    def without_optimizer(self, owned: set[int]) -> Sequence[tuple[int, str]]:
        """Returns identities and digests of parameters that get gradients and are not in a set of identities."""
        # A parameter that was frozen since is not meant to change.
        found = [self._hooked[key] for key in self._reached - owned if self._hooked[key].requires_grad]
        if sum(parameter.numel() for parameter in found) > _LARGE:
            found = found[:1]
        return [(id(parameter), digest(parameter)) for parameter in found]

    def _on_gradient(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
        known = self.local.get(id(parameter))
        if self.recorder.step < self.spec.steps and self.spec.purpose == "numbers":
            self.micro.setdefault(id(parameter), []).append((self.passes - 1, gradient.detach().clone()))
        self._reached.add(id(parameter))
        if id(parameter) in self._applied:
            left = parameter.grad is not None and bool(parameter.grad.any())
            (self.stale.add if left else self.stale.discard)(id(parameter))
            if not left:
                self._applied.discard(id(parameter))
        new = gradient.detach()
        self.local[id(parameter)] = new.clone() if known is None else known + new
        return gradient * self.weights[self.recorder.rank] if self.weights else None
