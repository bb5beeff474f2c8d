"""Probes of the optimizers: gradients of this rank, applied gradients, weights, and learning rates of each step."""

import functools
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddp_doctor.probes.state import StateProbe
from ddp_doctor.probes.wrap import before, wrap
from ddp_doctor.records.recorder import Recorder, digest, is_sharded, number_of, user_stack
from ddp_doctor.records.spec import Spec
from ddp_doctor.torch_internals import in_backward

# The gradients of more backward passes per step are not recorded one by one.
_MOST_PARTS = 16
# Of more values without an optimizer, one parameter is followed; of larger models, tensors are recorded in the first
# step alone.
_LARGE = 5_000_000
# The steps of a run whose tensors are recorded.
_MOST_STEPS = 6


class GradientProbe:
    """Observes the gradients of parameters.

    Attributes:
        local: Sums of the gradients of this rank since the last step, by the identity of the parameter.
        micro: The gradient of each backward pass with its number, by the identity of the parameter.
        stale: Identities of parameters whose gradient of an earlier step was still there.
        passes: Number of backward passes since the last step.
        reached: Parameters that have got a gradient, by their identity.
    """

    def __init__(self, recorder: Recorder, spec: Spec) -> None:
        self.recorder, self.spec = recorder, spec
        self.local: dict[int, torch.Tensor] = {}
        self.micro: dict[int, list[tuple[int, torch.Tensor]]] = {}
        self.stale: set[int] = set()
        self.passes = 0
        self.reached: dict[int, torch.Tensor] = {}
        # The references keep the identities from being used again.
        self._hooked: dict[int, torch.Tensor] = {}
        self._applied = set[int]()

    def forget(self) -> None:
        """Forgets the gradients so far."""
        for known in (self.local, self.micro, self.stale, self._applied, self.reached):
            known.clear()

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Records the gradients that this rank computes for the parameters."""
        for parameter in parameters:
            if id(parameter) not in self._hooked and parameter.requires_grad and parameter.is_leaf:
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

    def _on_gradient(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        known = self.local.get(id(parameter))
        if self.recorder.step < self.spec.steps and self.spec.purpose == "numbers":
            self.micro.setdefault(id(parameter), []).append((self.passes - 1, gradient.detach().clone()))
        self.reached[id(parameter)] = parameter
        if id(parameter) in self._applied:
            left = parameter.grad is not None and bool(parameter.grad.any())
            (self.stale.add if left else self.stale.discard)(id(parameter))
            if not left:
                self._applied.discard(id(parameter))
        new = gradient.detach()
        self.local[id(parameter)] = new.clone() if known is None else known + new


class StepProbe:
    """Observes the optimizers.

    Attributes:
        names: Names of parameters by their identity.
        loaded: Parameters with loaded weights by their identity.
        backward_ended: Called after each backward pass.
        step_ended: Called after each optimizer step.
    """

    def __init__(self, recorder: Recorder, spec: Spec) -> None:
        self.recorder, self.spec = recorder, spec
        self.names: dict[int, str] = {}
        self.optimizers: list[Optimizer] = []
        self.loaded: dict[int, torch.Tensor] = {}
        self.backward_ended: Callable[[], None] = lambda: None
        self.step_ended: Callable[[], None] = lambda: None
        self._consumed: list[int] = []
        self._stepping: list[Optimizer] = []
        self.gradients = GradientProbe(recorder, spec)
        self.state = StateProbe(recorder, spec)
        # In the order of their first steps.
        self._schedules: list[LRScheduler] = []
        self.state.optimizers = self.optimizers
        self.state.others += [self.gradients.local, self.gradients.micro]

    def install(self) -> None:
        """Installs the probes."""
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        wrap(Optimizer, "add_param_group", self._on_param_group)
        # Tensor.backward calls it, too.
        wrap(torch.autograd, "backward", self._on_backward)
        before(LRScheduler, "step", self._on_schedule)
        before(ReduceLROnPlateau, "step", self._on_metric)

    def forget(self) -> None:
        """Forgets the optimizers so far, which are not those of the training of all ranks."""
        self.optimizers.clear()
        self._consumed.clear()
        self.gradients.forget()

    def name_parameters(self, module: nn.Module) -> None:
        """Gives the parameters of a module their names."""
        for name, parameter in module.named_parameters():
            self.names.setdefault(id(parameter), name.removeprefix("module."))

    def parameters(self) -> dict[str, torch.Tensor]:
        """Returns the parameters of all optimizers by `<optimizer>:<position>`."""
        return {
            f"{number}:{position}": parameter
            for number, optimizer in enumerate(self.optimizers)
            for position, parameter in enumerate(_parameters(optimizer))
        }

    def most_steps(self, size: int) -> int:
        """Returns the steps whose tensors are recorded, for optimizers with so many values."""
        # A longer run serves checks that read no tensors.
        steps = min(self.spec.steps, _MOST_STEPS) if self.spec.purpose == "train" else self.spec.steps
        return 1 if size > _LARGE else 2 * steps

    def _on_param_group(self, original: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = original(optimizer, *args, **kwargs)
        self._know(optimizer)
        return result

    def _know(self, optimizer: Optimizer) -> None:
        if optimizer not in self.optimizers:
            self.recorder.add("optimizer")
            self.optimizers.append(optimizer)
        self.gradients.watch(_parameters(optimizer))

    def _on_backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if in_backward():
            # Of a checkpoint of activations.
            return original(*args, **kwargs)
        self._consumed.append(self.recorder.backwards)
        self.recorder.backwards += 1
        self.gradients.passes += 1
        loss = args[0] if args else kwargs.get("tensors")
        known = float(loss.detach()) if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None
        self.recorder.add("backward", loss=known)
        result = original(*args, **kwargs)
        self.backward_ended()
        return result

    def _on_schedule(self, schedule: LRScheduler, *_: Any, **__: Any) -> None:
        self.recorder.add("scheduler", scheduler=number_of(schedule, self._schedules))

    def _on_metric(self, schedule: Any, metrics: Any, *_: Any, **__: Any) -> None:
        with suppress(TypeError, ValueError):
            self.recorder.add("metric of schedule", name=type(schedule).__name__, value=float(metrics))

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self._know(optimizer)
        self._stepping.append(optimizer)
        if len(self._stepping) > 1:
            # A part of another optimizer, which records the step: a sharded optimizer has one with its own shard.
            self.recorder.add("part")
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._record(optimizer)
            self._hold(optimizer)
            return None
        seen: list[bool] = []

        def observed() -> Any:
            result = closure()
            if not seen:
                # An optimizer may call it several times per step.
                seen.append(True)
                self._record(optimizer)
            self._hold(optimizer)
            return result

        return (optimizer, observed), {}

    def _hold(self, optimizer: Optimizer) -> None:
        """Lets the step change nothing, if that is the intervention: a parameter without a gradient stays as it is."""
        if self.spec.interventions.get("still"):
            for parameter in _parameters(optimizer):
                parameter.grad = None

    def _record(self, optimizer: Optimizer) -> None:
        recorder, number = self.recorder, self.optimizers.index(optimizer)
        recorder.active = True
        if self.spec.purpose == "train":
            self.state.before_step()
        parameters = {f"{number}:{place}": parameter for place, parameter in enumerate(_parameters(optimizer))}
        size = sum(parameter.numel() for parameter in parameters.values())
        if recorder.step < self.most_steps(size):
            for key, parameter in parameters.items():
                recorder.keep(f"before/{recorder.step}/{key}", parameter)
                if parameter.grad is not None:
                    recorder.keep(f"applied/{recorder.step}/{key}", parameter.grad)
                self.gradients.keep(key, parameter)
        names = {
            key: self.names.get(id(parameter), f"parameter {place} of optimizer {number}")
            for place, (key, parameter) in enumerate(parameters.items())
        }
        recorder.add(
            "step",
            optimizer=number,
            name=type(optimizer).__name__,
            names=names,
            lr=[float(group["lr"]) for group in optimizer.param_groups],
            base=[float(group.get("initial_lr", 0.0)) for group in optimizer.param_groups],
            frozen=[names[key] for key, parameter in parameters.items() if not parameter.requires_grad],
            stale=[names[key] for key, parameter in parameters.items() if id(parameter) in self.gradients.stale],
            unowned=self._unowned(),
            stack=user_stack(),
            sharded=any(map(is_sharded, parameters.values())),
            loaded=[self.names[key] for key in self.loaded if key in self.names],
            passes=self._consumed,
        )
        self._consumed = []
        self.gradients.step(parameters.values())

    def _unowned(self) -> dict[str, str]:
        """Returns digests of the parameters that get gradients, but belong to no optimizer."""
        owned = {id(parameter) for optimizer in self.optimizers for parameter in _parameters(optimizer)}
        others = (parameter for key, parameter in self.gradients.reached.items() if key not in owned)
        # A parameter that was frozen since is not meant to change.
        found = [parameter for parameter in others if parameter.requires_grad and id(parameter) in self.names]
        if sum(parameter.numel() for parameter in found) > _LARGE:
            found = found[:1]
        return {self.names[id(parameter)]: digest(parameter) for parameter in found}

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._stepping.pop()
        if self._stepping:
            return
        number, recorder = self.optimizers.index(optimizer), self.recorder
        weights, parameters = dict[str, str](), _parameters(optimizer)
        kept = recorder.step < self.most_steps(sum(parameter.numel() for parameter in parameters))
        for place, parameter in enumerate(parameters):
            key = f"{number}:{place}"
            weights[key] = digest(parameter)
            if kept:
                recorder.keep(f"after/{recorder.step}/{key}", parameter)
        recorder.add("stepped", weights=weights)
        recorder.step += 1
        move = self.spec.interventions.get("move")
        if move and move["step"] == recorder.step:
            _move(_parameters(self.optimizers[move["optimizer"]]), move["by"])
        self.step_ended()


@torch.no_grad()
def _move(parameters: Iterable[torch.Tensor], by: float) -> None:
    """Moves parameters in a direction that depends on them alone, so that all ranks agree on it."""
    for parameter in parameters:
        parameter.add_(by * torch.cos(1e4 * parameter))


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
