"""What one process gets of the ranks: their batches joined, or the inputs of each of their micro-batches in turn."""

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import isclose
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ddp_doctor.probes.draws import Draw
from ddp_doctor.probes.generators import global_states, set_global_states
from ddp_doctor.probes.steps import StepProbe
from ddp_doctor.records.recorder import Recorder
from ddp_doctor.torch_internals import in_backward, tree_leaves, tree_map, without_modes


def records_of(folder: Path, world_size: int) -> list[dict[str, Any]]:
    """Returns what the ranks of a run recorded."""
    # Each process of a command does this, including workers: mapped files are in memory once, and only as needed.
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False, mmap=True) for rank in range(world_size)]


class RankBatches:
    """What the ranks of a run were given, joined.

    Args:
        ranks: What they recorded.

    Attributes:
        failures: Why a batch could not be joined, in plain words.
    """

    def __init__(self, ranks: Sequence[dict[str, Any]]) -> None:
        self.tensors: list[dict[str, torch.Tensor]] = [part["tensors"] for part in ranks]
        self.failures: list[str] = []

    def has(self, loader: int, iteration: int, number: int) -> bool:
        """Returns whether all ranks had this batch."""
        prefix = f"batch/{loader}/{iteration}/{number}/"
        return all(any(name.startswith(prefix) for name in tensors) for tensors in self.tensors)

    def batch(
        self, template: Any, loader: int, iteration: int, number: int, collate: Callable[[list[int]], Any]
    ) -> Any:
        """Returns a batch of the ranks in the structure of a template, concatenated.

        Of other shapes, or with texts, it is collated of the indices of all their samples, if that is possible.
        """
        name = f"{loader}/{iteration}/{number}"
        keys = [key for key in self.tensors[0] if key.startswith(f"batch/{name}/")]
        shapes = [{tensors[key].shape[1:] for tensors in self.tensors if key in tensors} for key in keys]
        collates = any(len(one) > 1 for one in shapes) or any(isinstance(leaf, str) for leaf in tree_leaves(template))
        if collates and (found := self._collated(name, collate)) is not None:
            return found
        places = itertools.count()

        def join(leaf: torch.Tensor) -> torch.Tensor:
            key = f"batch/{name}/{next(places)}"
            parts = [tensors[key] for tensors in self.tensors if key in tensors]
            if len(parts) != len(self.tensors) or any(part.ndim != leaf.ndim for part in parts):
                self.failures.append("its structure differs between the ranks and one process")
                return leaf
            if not leaf.ndim:
                if not all(torch.equal(part, parts[0]) for part in parts):
                    self.failures.append("it contains a number per batch, which differs between the ranks")
                return parts[0]
            if any(part.shape[1:] != parts[0].shape[1:] for part in parts):
                self.failures.append("the shapes of the ranks differ, as after padding to the longest sample")
                return leaf
            return torch.cat(parts)

        return tree_map(join, template)

    def _collated(self, name: str, collate: Callable[[list[int]], Any]) -> Any:
        """Returns a batch of the samples of all ranks, if such batches of each rank are those that it had."""
        indices = [tensors[f"indices/{name}"].tolist() for tensors in self.tensors if f"indices/{name}" in tensors]
        if len(indices) < len(self.tensors) or not all(indices):
            return None
        with without_modes(), suppress(Exception):
            # What a data set raises is not for the program.
            for own, tensors in zip(indices, self.tensors, strict=True):
                for place, leaf in enumerate(tree_leaves(collate(own))):
                    if isinstance(leaf, torch.Tensor) and not torch.equal(leaf, tensors[f"batch/{name}/{place}"]):
                        return None
            return collate([index for own in indices for index in own])
        return None

    def draws(self, loader: int, iteration: int, number: int) -> list[list[Draw]]:
        """Returns the draws of each rank in the step after a batch."""
        prefix, found = f"draw/{loader}/{iteration}/{number}/", []
        for tensors in self.tensors:
            own: dict[str, Draw] = {}
            for name, tensor in tensors.items():
                if name.startswith(prefix):
                    draw, _, operator = name.removeprefix(prefix).split("/", 2)
                    own.setdefault(draw, Draw(operator, [])).outputs.append(tensor)
            found.append(list(own.values()))
        return found


# Tensors of more values, such as a table that the loss looks up, are not data of a batch.
_MOST_VALUES = 20_000_000
_MOST_INPUTS = 100


class MicroBatchProbe(TorchFunctionMode):
    """Records the inputs of each micro-batch of the first step, or replaces them by those of the ranks.

    A micro-batch ends with a backward pass. One process gets those of all ranks one after another, whatever it has
    loaded: the tensors that enter the model and the functions of its outputs, the states of the random generators, and
    the initial weights. It may step after the micro-batches of each rank, or after those of all ranks.

    Args:
        recorder: Takes the inputs.
        steps: Knows the weights.
        ranks: What the ranks recorded whose micro-batches this process gets; empty where they are recorded.

    Attributes:
        plan: The rank of each micro-batch of this process, and its number there; empty where they are recorded.
        inside_model: Whether the model is being called.
    """

    def __init__(self, recorder: Recorder, steps: StepProbe, ranks: Sequence[dict[str, Any]]) -> None:
        super().__init__()
        self.recorder, self.steps = recorder, steps
        self.plan: list[tuple[int, int]] = []
        for rank, part in enumerate(ranks):
            passes = [event["step"] for event in part["events"] if event["kind"] == "backward"]
            self.plan += [(rank, number) for number in range(passes.count(0))]
        self._ranks: Sequence[dict[str, torch.Tensor]] = [part["tensors"] for part in ranks]
        self.inside_model = False
        self._number = 0
        self._counts: dict[str, int] = {}

    def install(self) -> None:
        """Installs the probe in this thread."""
        self.steps.backward_ended = self._end
        self._at("start")
        self.__enter__()  # type: ignore[no-untyped-call]

    @property
    def turn(self) -> tuple[int, int] | None:
        """Whose micro-batch this process is at; None where they are recorded, and after the last."""
        return self.plan[self._number] if self._number < len(self.plan) else None

    @property
    def _recording(self) -> bool:
        return not self.plan and not self.recorder.step

    def loaded(self, loader: int, batch: Any) -> Any:
        """Returns the batch that a loader gives to the training."""
        (batch,), _ = self._inputs(f"loader {loader}", (batch,), {})
        self._at("loaded")
        return batch

    def model_inputs(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Returns the arguments of a call of the model."""
        if not torch.is_grad_enabled() or in_backward():
            return args, kwargs
        if not any(other.startswith("model ") for other in self._counts):
            self._at("model")
            weights = initial_weights(self._ranks[self.turn[0]]) if self.turn else {}
            with torch.no_grad():
                for key, parameter in self.steps.parameters().items():
                    if key in weights and weights[key].shape == parameter.shape:
                        parameter.copy_(weights[key])
        return self._inputs(f"model {name}", args, kwargs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function; one that combines outputs of the model with other tensors gets those of a rank."""
        kwargs = kwargs or {}
        # A collective has places for the tensors of all ranks, of which one process has its own alone.
        is_collective = str(getattr(func, "__module__", "")).startswith("torch.distributed")
        if is_collective or self.inside_model or not torch.is_grad_enabled() or in_backward():
            return func(*args, **kwargs)
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(leaf.requires_grad and not leaf.is_leaf for leaf in leaves) and not all(
            leaf.requires_grad for leaf in leaves
        ):
            args, kwargs = self._inputs(f"function {getattr(func, '__name__', '')}", args, kwargs)
        return func(*args, **kwargs)

    def _inputs(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        count = self._counts[name] = self._counts.get(name, 0) + 1
        if count > _MOST_INPUTS:
            return args, kwargs
        place, turn = itertools.count(), self.turn

        def take(leaf: torch.Tensor) -> torch.Tensor:
            key = f"input/{{}}/{name}/{count}/{next(place)}"
            if leaf.requires_grad or leaf.numel() > _MOST_VALUES:
                return leaf
            if self._recording:
                self.recorder.keep(key.format(self._number), leaf)
            other = self._ranks[turn[0]].get(key.format(turn[1])) if turn else None
            if other is None or other.dtype != leaf.dtype or other.ndim != leaf.ndim:
                return leaf
            is_number = leaf.numel() == other.numel() == 1 and (not leaf.ndim or name.startswith("function"))
            if is_number and not isclose(float(leaf), float(other), rel_tol=1e-6):
                # Such as the tokens that the ranks have counted together.
                self.recorder.add("number")
            return other.clone().to(leaf.device)

        return tree_map(take, (args, kwargs))

    def _end(self) -> None:
        self._number += 1
        self._counts.clear()
        self._at("start")

    def _at(self, point: str) -> None:
        """Records or replaces the states of the random generators."""
        for name, state in global_states().items() if self._recording else ():
            self.recorder.tensors[f"random/{self._number}/{point}/{name}"] = state
        if self.turn:
            rank, number = self.turn
            prefix, known = f"random/{number}/{point}/", self._ranks[rank].items()
            set_global_states({name.removeprefix(prefix): state for name, state in known if name.startswith(prefix)})


def initial_weights(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the weights of a rank before the first step of each optimizer, by `<optimizer>:<position>`."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith("before/"):
            found.setdefault(name.split("/", 2)[2], tensor)
    return found
