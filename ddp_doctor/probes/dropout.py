"""Probe of dropout in evaluation: the operators that drop values while no gradients are computed."""

from __future__ import annotations

from typing import Any

import torch

from ddp_doctor.records.recorder import Recorder
from ddp_doctor.torch_internals import DispatchMode

_RECURRENT = {"aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"}
_MOST_EVENTS = 8


class DropoutWatch(DispatchMode):
    """Sees dropout that is active without gradients, as a function, in a module, or in attention.

    Args:
        recorder: Takes an event `dropout` with the probability.
    """

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
                self.recorder.add("dropout", operator=func._schema.name, rate=rate)
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
