"""Probe of losses that are means over labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from ddp_doctor.probes.wrap import wrap
from ddp_doctor.records.recorder import Recorder

_MOST_EVENTS = 500
# The positions of the arguments in the signatures of torch.
_IGNORED, _REDUCTION = 4, 6


class LossProbe:
    """Records over how many labels `cross_entropy` and `nll_loss` take a mean."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._left = _MOST_EVENTS

    def install(self) -> None:
        """Installs the probe."""
        for name in ("cross_entropy", "nll_loss"):
            wrap(functional, name, self._on_loss)

    def _on_loss(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        target = args[1] if len(args) > 1 else kwargs.get("target")
        reduction = args[_REDUCTION] if len(args) > _REDUCTION else kwargs.get("reduction", "mean")
        weight = args[2] if len(args) > 2 else kwargs.get("weight")
        known = isinstance(target, torch.Tensor) and not target.is_floating_point() and weight is None
        # cross_entropy of torch does not call nll_loss of Python.
        if known and reduction == "mean" and result.requires_grad and self._left > 0:
            self._left -= 1
            ignored = args[_IGNORED] if len(args) > _IGNORED else kwargs.get("ignore_index", -100)
            count = int((target != ignored).sum())
            self.recorder.add("mean_of_labels", value=float(result.detach()), count=count)
        return result
