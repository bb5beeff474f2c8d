"""Probe of the random draws of each step, from torch's generators and from those of NumPy and Python."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from ddp_doctor.probes.flows import DrawFlow
from ddp_doctor.probes.generators import OwnGenerators, States, drawn, values_drawn
from ddp_doctor.probes.random_replay import RandomReplay
from ddp_doctor.probes.rank_batches import RankBatches
from ddp_doctor.records.recorder import Recorder, digest
from ddp_doctor.records.spec import Spec
from ddp_doctor.torch_internals import DispatchMode


class DrawProbe:
    """Records or replaces the draws between a batch and the next one."""

    def __init__(self, recorder: Recorder, spec: Spec, feed: RankBatches | None, own: OwnGenerators) -> None:
        self.recorder, self.spec, self.feed, self.own = recorder, spec, feed, own
        self.tape, self.dropout = RandomReplay(), DropoutWatch(recorder)
        self.tape.recording = spec.purpose in {"numbers", "whole", "resume"} and feed is None
        self.tape.reverse = bool(spec.interventions.get("reverse"))
        if spec.purpose == "train":
            self.tape.flow = DrawFlow()
        self._watched = False
        self._newest: dict[str, Any] | None = None
        self._hidden = States()
        self._own: dict[int, Any] = {}

    def enter(self, batch: dict[str, Any], content: Any) -> None:
        """Begins the step after a training batch with this content."""
        self._newest = batch
        if self.tape.flow:
            self.tape.flow.begin(content)
        self.tape.most = 0
        if self.feed:
            self.tape.replay(self.feed.draws(batch["loader"], batch["iteration"], batch["number"]))
        self._hidden, self._own = States(), self.own.copies()
        self.tape.__enter__()  # type: ignore[no-untyped-call]

    def watch_dropout(self) -> None:
        """Sees active dropout until the next batch."""
        self._watched = True
        self.dropout.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """Ends the step after the newest batch, and keeps its draws."""
        if self._watched:
            self._watched = False
            self.dropout.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        batch, self._newest = self._newest, None
        if batch is None:
            return
        self.tape.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        batch["drawn"] = self.tape.most
        values = values_drawn(self._hidden, States())
        batch["hidden"] = {name: number for name, number in values.items() if number}
        batch["own_step"] = drawn(self._own, self.own.copies())
        batch["flows"] = self.tape.flow.found() if self.tape.flow else []
        hidden = [*batch["hidden"], *(["a generator that the program has created"] if batch["own_step"] else [])]
        self.recorder.add("drew", hidden=" and ".join(hidden))
        draws, self.tape.draws = self.tape.draws, []
        if self.spec.purpose != "numbers":
            batch["draw_digest"] = digest([draw.outputs for draw in draws])
            return
        for number, draw in enumerate(draws):
            for place, output in enumerate(draw.outputs):
                name = f"draw/{batch['loader']}/{batch['iteration']}/{batch['number']}/{number}/{place}/{draw.name}"
                self.recorder.tensors[name] = output


_RECURRENT = {"aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"}
_MOST_EVENTS = 8


class DropoutWatch(DispatchMode):
    """Sees dropout that is active without gradients, as a function, in a module, or in attention."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder
        self._mask: tuple[torch.Tensor, float] | None = None
        self._left = _MOST_EVENTS

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator, and records it if it drops values."""
        kwargs = kwargs or {}
        if self._left and not torch.is_grad_enabled():
            rate = self._rate(func._schema, args, kwargs)
            if rate > 0:
                self._left -= 1
                self.recorder.add("dropout", rate=rate)
        return func(*args, **kwargs)

    def _rate(self, schema: Any, args: Any, kwargs: Any) -> float:
        mask, self._mask = self._mask, None
        if schema.name == "aten::bernoulli_" and schema.overload_name == "float":
            self._mask = (args[0], float(args[1] if len(args) > 1 else kwargs.get("p", 0.5)))
        elif schema.name == "aten::div_" and mask is not None and args[0] is mask[0] and args[1:2] == (mask[1],):
            # Outside of inference mode, dropout is a mask that is divided by the share that is kept.
            return 1 - mask[1]
        elif "dropout" in schema.name or "scaled_dot_product" in schema.name or schema.name in _RECURRENT:
            values = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
            rate = next((values[name] for name in ("dropout_p", "dropout", "p") if values.get(name)), 0.0)
            return float(rate) if values.get("train", True) is not False else 0.0
        return 0.0


def seed_own(owner: Any, seed: int, depth: int = 0) -> None:
    """Seeds the generators that an object, its parts, or what it wraps keep in their attributes."""
    if isinstance(owner, torch.Generator):
        owner.manual_seed(seed)
    elif isinstance(owner, random.Random | np.random.RandomState):
        owner.seed(seed)
    elif isinstance(owner, np.random.Generator):
        owner.bit_generator.state = type(owner.bit_generator)(seed).state
    elif depth < 3 and hasattr(owner, "__dict__"):
        parts = list(owner.modules())[1:] if isinstance(owner, torch.nn.Module) else []
        for value in [*vars(owner).values(), *parts]:
            seed_own(value, seed, depth + 1)
