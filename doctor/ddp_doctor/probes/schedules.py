"""Probe of the learning rate schedules of torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ddp_doctor.probes.wrap import wrap
from ddp_doctor.records.recorder import Recorder
from ddp_doctor.records.spec import Spec

# Learning rates of a schedule after the last step that the program makes.
_AHEAD = 2_000


class ScheduleProbe:
    """Records each step of a schedule, and at the end what it would have become.

    Attributes:
        known: The schedules, in the order of their first steps.
    """

    def __init__(self, recorder: Recorder, spec: Spec) -> None:
        self.recorder, self.spec = recorder, spec
        self.known: list[LRScheduler] = []
        self._stepped: dict[int, int] = {}
        self._calls: Counter[int] = Counter()
        self._is_ahead = False

    def install(self) -> None:
        """Installs the probe."""
        wrap(LRScheduler, "step", self._on_step)
        wrap(ReduceLROnPlateau, "step", self._on_metric)

    def _on_metric(self, original: Callable[..., Any], scheduler: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
        with suppress(TypeError, ValueError):
            self.recorder.add("metric of schedule", name=type(scheduler).__name__, value=float(metrics))
        return original(scheduler, metrics, *args, **kwargs)

    def look_ahead(self) -> None:
        """Records the learning rates of the steps that a whole training run makes; nothing trains afterwards."""
        self._is_ahead = True
        for number, scheduler in enumerate(self.known):
            if not type(scheduler).__module__.startswith("torch."):
                # A class of the program may need the other ranks.
                continue
            group = scheduler.optimizer.param_groups[0]
            base, rates = group.get("initial_lr"), [float(group["lr"])]
            # OneCycleLR has a last step, and a schedule of the program may need more than its own state.
            with suppress(Exception):
                while base and len(rates) < _AHEAD:
                    scheduler.step()
                    rates.append(float(group["lr"]))
            if base:
                self.recorder.add(
                    "ahead", scheduler=number, calls=self._calls[number], rates=[rate / float(base) for rate in rates]
                )

    def _on_step(self, original: Callable[..., Any], scheduler: LRScheduler, *args: Any, **kwargs: Any) -> Any:
        if self._is_ahead:
            return original(scheduler, *args, **kwargs)
        if not any(other is scheduler for other in self.known):
            self.known.append(scheduler)
        number = next(place for place, other in enumerate(self.known) if other is scheduler)
        again = self._stepped.get(number) == self.recorder.step > 0
        self._stepped[number] = self.recorder.step
        if again and self.spec.interventions.get("step_schedules_once"):
            return None
        # torch makes the first call, before any optimizer step.
        self._calls[number] += self.recorder.step > 0
        self.recorder.add("scheduler", name=type(scheduler).__name__, scheduler=number)
        return original(scheduler, *args, **kwargs)
