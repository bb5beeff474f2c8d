"""What enters the model and the loss in each micro-batch: recorded on the ranks, and given to one process in turn.

A micro-batch ends with a backward pass. One process gets those of all ranks one after another, whatever it has loaded:
the tensors that enter the model and the functions of its outputs, the states of the random generators, and the weights
that the ranks had. It may step after the micro-batches of each rank, or after those of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isclose
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from ddp_doctor.probes.generators import global_states, set_global_states
from ddp_doctor.probes.steps import StepProbe
from ddp_doctor.records.recorder import Recorder
from ddp_doctor.torch_internals import in_backward, tree_leaves, tree_map

# Tensors of more values, such as a table that the loss looks up, are not data of a batch.
_MOST_VALUES = 20_000_000
# What transformers calls the number of tokens of all ranks and micro-batches.
_COUNT = "num_items_in_batch"
_MOST_INPUTS = 100
FUNCTION = "function "


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


def turns(steps: Sequence[Sequence[int]], optimizers: Sequence[int]) -> list[Turn]:
    """Returns the order in which one process gets the micro-batches of the ranks.

    Args:
        steps: For each rank, the step that each of its micro-batches belongs to.
        optimizers: The optimizer of each step; several take turns in the same order.
    """
    count, period = len(optimizers), 1
    while period < count and any(optimizers[place] != optimizers[place % period] for place in range(count)):
        period += 1
    found = []
    for begin in range(0, count - count % period, period):
        part = range(begin, begin + period)
        for rank, of_rank in enumerate(steps):
            found += [Turn(step, rank, number) for number, step in enumerate(of_rank) if step in part]
    return found


def plan_of(ranks: Sequence[Sequence[dict[str, Any]]]) -> list[Turn]:
    """Returns the turns of one process that gets the micro-batches of ranks with these events."""
    optimizers = [event["optimizer"] for event in ranks[0] if event["kind"] == "step"]
    passes = [[event["step"] for event in events if event["kind"] == "backward"] for events in ranks]
    return turns(passes, optimizers)


class MicroBatchProbe:
    """Records the inputs of each micro-batch, or replaces them by those of the ranks.

    Attributes:
        plan: Whose micro-batch each of this process is; empty where they are recorded.
        ranks: The tensors that each rank recorded.
        inside_model: Whether the model is being called.
    """

    def __init__(self, recorder: Recorder, steps: StepProbe) -> None:
        self.recorder, self.steps = recorder, steps
        self.plan: list[Turn] = []
        self.ranks: Sequence[dict[str, torch.Tensor]] = ()
        self.inside_model = False
        self._number = 0
        self._counts: dict[str, int] = {}
        self._began = False
        self._weights_of: Turn | None = None
        # The number of tokens that the model was given, and that of one process.
        self._count: tuple[torch.Tensor, float] | None = None

    def follow(self, folder: Path, world_size: int, begin: int = 0) -> None:
        """Lets this process get the micro-batches of the ranks of a run, from its folder.

        Args:
            folder: The folder.
            world_size: Number of ranks.
            begin: How many of the micro-batches an earlier process has had.
        """
        loaded = [torch.load(folder / f"rank{rank}.pt", weights_only=True, mmap=True) for rank in range(world_size)]
        self.ranks = [part["tensors"] for part in loaded]
        self.plan = plan_of([part["events"] for part in loaded])[begin:]

    def install(self) -> None:
        """Installs the probe in this thread."""
        self.steps.backward_ended = self._end
        self._at("start")
        _FunctionInputs(self).__enter__()  # type: ignore[no-untyped-call]

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
        self._begin()
        given_args, given = self._inputs(f"model {name}", args, kwargs)
        if isinstance(kwargs.get(_COUNT), torch.Tensor):
            self._count = given[_COUNT], float(kwargs[_COUNT])
        return given_args, given

    def see(self, args: Any, kwargs: Any) -> None:
        """Records that a model of transformers divides its loss by the number that it was given; others ignore it."""
        if self._count and any(value is self._count[0] for value in (*args, *kwargs.values())):
            (given, own), self._count = self._count, None
            self._compare_numbers("div", own, float(given))

    def function_inputs(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Returns the arguments of a function of the model's outputs, such as a loss."""
        return self._inputs(f"{FUNCTION}{name}", args, kwargs)

    def _inputs(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        count = self._counts[name] = self._counts.get(name, 0) + 1
        if count > _MOST_INPUTS:
            return args, kwargs
        place, turn = iter(range(1_000_000)), self.turn

        def take(leaf: torch.Tensor) -> torch.Tensor:
            key = f"input/{{}}/{name}/{count}/{next(place)}"
            if leaf.requires_grad or leaf.numel() > _MOST_VALUES:
                return leaf
            if not self.plan:
                self.recorder.keep(key.format(self._number), leaf)
                return leaf
            other = self.ranks[turn.rank].get(key.format(turn.number)) if turn else None
            if other is None or other.dtype != leaf.dtype or other.ndim != leaf.ndim:
                return leaf
            if name.startswith(FUNCTION) and leaf.numel() == other.numel() == 1:
                self._compare_numbers(name.removeprefix(FUNCTION), float(leaf), float(other))
            return other.clone().to(leaf.device)

        return tree_map(take, (args, kwargs))

    def _compare_numbers(self, name: str, own: float, given: float) -> None:
        """Records a number that is another one on the ranks, such as the tokens that they have counted together."""
        if self.turn and not isclose(own, given, rel_tol=1e-6):
            self.recorder.add("number", function=name, own=own, given=given, turn=list(self.turn))

    def _begin(self) -> None:
        """Begins the calls of the model in this micro-batch."""
        if not self._began:
            self._began = True
            self._at("model")
            self._set_weights()

    def _end(self) -> None:
        self._number += 1
        self._counts.clear()
        self._began = False
        self._at("start")

    def _set_weights(self) -> None:
        """Gives this process the weights that the rank had in the step that comes."""
        turn, known = self.turn, self._weights_of
        if turn is None or (known and known[:2] == turn[:2]):
            return
        self._weights_of = turn
        weights = weights_at(self.ranks[turn.rank], turn.step)
        with torch.no_grad():
            for key, parameter in self.steps.parameters().items():
                if key in weights and weights[key].shape == parameter.shape:
                    parameter.copy_(weights[key])

    def _at(self, point: str) -> None:
        """Records or replaces the states of the random generators."""
        turn = self.turn
        if not self.plan:
            for name, state in global_states().items():
                self.recorder.tensors[f"random/{self._number}/{point}/{name}"] = state
        elif turn:
            prefix = f"random/{turn.number}/{point}/"
            found = {
                name.removeprefix(prefix): tensor
                for name, tensor in self.ranks[turn.rank].items()
                if name.startswith(prefix)
            }
            set_global_states(found)


class _FunctionInputs(TorchFunctionMode):
    """Sees the functions that combine outputs of the model with other tensors."""

    def __init__(self, probe: MicroBatchProbe) -> None:
        super().__init__()
        self.probe = probe

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function, with the inputs of a rank."""
        kwargs = kwargs or {}
        self.probe.see(args, kwargs)
        # A collective has places for the tensors of all ranks, of which one process has its own alone.
        is_collective = str(getattr(func, "__module__", "")).startswith("torch.distributed")
        if is_collective or self.probe.inside_model or not torch.is_grad_enabled() or in_backward():
            return func(*args, **kwargs)
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(leaf.requires_grad and not leaf.is_leaf for leaf in leaves) and not all(
            leaf.requires_grad for leaf in leaves
        ):
            args, kwargs = self.probe.function_inputs(getattr(func, "__name__", ""), args, kwargs)
        return func(*args, **kwargs)


def weights_at(tensors: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    """Returns the weights of a rank before a step, over all optimizers, by `<optimizer>:<position>`."""
    found: dict[str, tuple[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition("/")
        if kind not in {"before", "after"}:
            continue
        number, _, key = rest.partition("/")
        # Weights before a later step are those of now, unless there are newer ones.
        when = 2 * int(number) + (kind == "after")
        known = found.get(key)
        if known is None:
            better = when <= 2 * step or kind == "before"
        elif when <= 2 * step:
            better = known[0] < when or known[0] > 2 * step
        else:
            better = kind == "before" and known[0] > when
        if better:
            found[key] = when, tensor
    return {key: tensor for key, (_, tensor) in found.items()}
