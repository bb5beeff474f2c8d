"""What one process gets of the ranks: their batches joined, or the inputs of each of their micro-batches in turn."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import isclose
from pathlib import Path
from typing import Any, NamedTuple

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

        Of other shapes, it is collated of the indices of all their samples, if that is possible.
        """
        name = f"{loader}/{iteration}/{number}"
        if (found := self._collated(name, collate)) is not None:
            return found
        places = itertools.count()

        def join(leaf: Any) -> Any:
            place = next(places)
            if not isinstance(leaf, torch.Tensor):
                if not isinstance(leaf, int | float | bool | type(None)):
                    self.failures.append(f"it contains values of the type {type(leaf).__name__}, not only tensors")
                return leaf
            key = f"batch/{name}/{place}"
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
        """Returns a batch of the samples of all ranks, which have padded theirs to other lengths, for example.

        Such batches of the samples of each rank must be those that it had.
        """
        keys = [key for key in self.tensors[0] if key.startswith(f"batch/{name}/")]
        shapes = [{tensors[key].shape[1:] for tensors in self.tensors if key in tensors} for key in keys]
        indices = [tensors[f"indices/{name}"].tolist() for tensors in self.tensors if f"indices/{name}" in tensors]
        if all(len(found) == 1 for found in shapes) or len(indices) < len(self.tensors) or not all(indices):
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
            for name in (name for name in tensors if name.startswith(prefix)):
                order, _, operator = name.removeprefix(prefix).split("/", 2)
                own.setdefault(order, Draw(operator, [])).outputs.append(tensors[name])
            found.append(list(own.values()))
        return found


# Tensors of more values, such as a table that the loss looks up, are not data of a batch.
_MOST_VALUES = 20_000_000
# What transformers calls the number of tokens of all ranks and micro-batches.
_COUNT = "num_items_in_batch"
_MOST_INPUTS = 100
_FUNCTION = "function "


class Turn(NamedTuple):
    """A micro-batch of a rank.

    Attributes:
        step: Optimizer step of the ranks that it belongs to, over all optimizers.
        rank: The rank.
        number: Its number on the rank.
    """

    step: int
    rank: int
    number: int


def plan_of(ranks: Sequence[Sequence[dict[str, Any]]]) -> list[Turn]:
    """Returns the order in which one process gets the micro-batches of ranks with these events.

    Several optimizers take turns in the same order.
    """
    optimizers = [event["optimizer"] for event in ranks[0] if event["kind"] == "step"]
    count, period = len(optimizers), 1
    while period < count and any(optimizers[place] != optimizers[place % period] for place in range(count)):
        period += 1
    found = []
    for begin in range(0, count - count % period, period):
        for rank, events in enumerate(ranks):
            passes = enumerate(event["step"] for event in events if event["kind"] == "backward")
            found += [Turn(step, rank, number) for number, step in passes if begin <= step < begin + period]
    return found


class MicroBatchProbe(TorchFunctionMode):
    """Records the inputs of each micro-batch, or replaces them by those of the ranks.

    A micro-batch ends with a backward pass. One process gets those of all ranks one after another, whatever it has
    loaded: the tensors that enter the model and the functions of its outputs, the states of the random generators, and
    the weights that the ranks had. It may step after the micro-batches of each rank, or after those of all ranks.

    Args:
        recorder: Takes the inputs.
        steps: Knows the weights.
        ranks: What the ranks recorded whose micro-batches this process gets; empty where they are recorded.

    Attributes:
        plan: Whose micro-batch each of this process is; empty where they are recorded.
        inside_model: Whether the model is being called.
    """

    def __init__(self, recorder: Recorder, steps: StepProbe, ranks: Sequence[dict[str, Any]]) -> None:
        super().__init__()
        self.recorder, self.steps = recorder, steps
        self.plan = plan_of([part["events"] for part in ranks]) if ranks else []
        self._ranks: Sequence[dict[str, torch.Tensor]] = [part["tensors"] for part in ranks]
        self.inside_model = False
        self._number = 0
        self._counts: dict[str, int] = {}
        self._began = False
        # The number of tokens that the model was given, and that of one process.
        self._count: tuple[torch.Tensor, float] | None = None

    def install(self) -> None:
        """Installs the probe in this thread."""
        self.steps.backward_ended = self._end
        self._at("start")
        self.__enter__()  # type: ignore[no-untyped-call]

    @property
    def turn(self) -> Turn | None:
        """Whose micro-batch this process is at; None where they are recorded, and after the last."""
        return self.plan[self._number] if self._number < len(self.plan) else None

    def loaded(self, loader: int, batch: Any) -> Any:
        """Returns the batch that a loader gives to the training."""
        (batch,), _ = self._inputs(f"loader {loader}", (batch,), {})
        self._at("loaded")
        return batch

    def model_inputs(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Returns the arguments of a call of the model."""
        if not torch.is_grad_enabled() or in_backward():
            return args, kwargs
        if not self._began:
            self._began = True
            self._at("model")
            self._set_weights()
        given_args, given = self._inputs(f"model {name}", args, kwargs)
        if isinstance(kwargs.get(_COUNT), torch.Tensor):
            self._count = given[_COUNT], float(kwargs[_COUNT])
        return given_args, given

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function; one that combines outputs of the model with other tensors gets those of a rank."""
        kwargs = kwargs or {}
        if self._count and any(value is self._count[0] for value in (*args, *kwargs.values())):
            # A model of transformers divides its loss by the number that it was given; others ignore it.
            (given, own), self._count = self._count, None
            self._compare_numbers("div", own, float(given))
        # A collective has places for the tensors of all ranks, of which one process has its own alone.
        is_collective = str(getattr(func, "__module__", "")).startswith("torch.distributed")
        if is_collective or self.inside_model or not torch.is_grad_enabled() or in_backward():
            return func(*args, **kwargs)
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(leaf.requires_grad and not leaf.is_leaf for leaf in leaves) and not all(
            leaf.requires_grad for leaf in leaves
        ):
            args, kwargs = self._inputs(f"{_FUNCTION}{getattr(func, '__name__', '')}", args, kwargs)
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
            if not self.plan:
                self.recorder.keep(key.format(self._number), leaf)
                return leaf
            other = self._ranks[turn.rank].get(key.format(turn.number)) if turn else None
            if other is None or other.dtype != leaf.dtype or other.ndim != leaf.ndim:
                return leaf
            if name.startswith(_FUNCTION) and leaf.numel() == other.numel() == 1:
                self._compare_numbers(name.removeprefix(_FUNCTION), float(leaf), float(other))
            return other.clone().to(leaf.device)

        return tree_map(take, (args, kwargs))

    def _compare_numbers(self, name: str, own: float, given: float) -> None:
        """Records a number that is another one on the ranks, such as the tokens that they have counted together."""
        if self.turn and not isclose(own, given, rel_tol=1e-6):
            self.recorder.add("number", function=name, own=own, given=given, turn=list(self.turn))

    def _end(self) -> None:
        self._number += 1
        self._counts.clear()
        self._began = False
        self._at("start")

    def _set_weights(self) -> None:
        """Gives this process the weights that the rank had in the step that comes."""
        if self.turn is None:
            return
        weights = weights_at(self._ranks[self.turn.rank], self.turn.step)
        with torch.no_grad():
            for key, parameter in self.steps.parameters().items():
                if key in weights and weights[key].shape == parameter.shape:
                    parameter.copy_(weights[key])

    def _at(self, point: str) -> None:
        """Records or replaces the states of the random generators."""
        turn = self.turn
        if not self.plan:
            for name, state in global_states().items() if not self.recorder.later else ():
                self.recorder.tensors[f"random/{self._number}/{point}/{name}"] = state
        elif turn:
            prefix = f"random/{turn.number}/{point}/"
            found = {
                name.removeprefix(prefix): tensor
                for name, tensor in self._ranks[turn.rank].items()
                if name.startswith(prefix)
            }
            set_global_states(found)


def weights_at(tensors: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    """Returns the weights of a rank before a step, over all optimizers, by `<optimizer>:<position>`."""
    found: dict[str, torch.Tensor] = {}
    # In the order in which they were recorded: weights before a later step are those of now, unless there are others.
    for name, tensor in tensors.items():
        kind, _, rest = name.partition("/")
        if kind in {"before", "after"}:
            number, _, key = rest.partition("/")
            if key not in found or int(number) + (kind == "after") <= step:
                found[key] = tensor
    return found
