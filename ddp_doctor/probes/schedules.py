"""Probe of the learning rate schedules of torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ddp_doctor.probes.wrap import wrap
from ddp_doctor.records.recorder import Recorder
from ddp_doctor.records.spec import Spec


class ScheduleProbe:
    """Records each step of a schedule.

    Attributes:
        known: The schedules, in the order of their first steps.
    """

    def __init__(self, recorder: Recorder, spec: Spec) -> None:
        self.recorder, self.spec = recorder, spec
        self.known: list[LRScheduler] = []
        self._stepped: dict[int, int] = {}

    def install(self) -> None:
        """Installs the probe."""
        wrap(LRScheduler, "step", self._on_step)
        wrap(ReduceLROnPlateau, "step", self._on_metric)

    def _on_metric(self, original: Callable[..., Any], scheduler: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
        with suppress(TypeError, ValueError):
            self.recorder.add("metric of schedule", name=type(scheduler).__name__, value=float(metrics))
        return original(scheduler, metrics, *args, **kwargs)

    def _on_step(self, original: Callable[..., Any], scheduler: LRScheduler, *args: Any, **kwargs: Any) -> Any:
        if not any(other is scheduler for other in self.known):
            self.known.append(scheduler)
        number = next(place for place, other in enumerate(self.known) if other is scheduler)
        again = self._stepped.get(number) == self.recorder.step > 0
        self._stepped[number] = self.recorder.step
        if again and self.spec.interventions.get("step_schedules_once"):
            return None
        self.recorder.add("scheduler", name=type(scheduler).__name__, scheduler=number)
        return original(scheduler, *args, **kwargs)
