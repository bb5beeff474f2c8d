"""What a run has computed, before it becomes `result.json`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lit_mnist.profiling.timing import StepClock


@dataclass(frozen=True)
class Trained:
    """The metrics of a training run.

    Attributes:
        steps: Optimizer steps since the start of the run.
        steps_now: Optimizer steps since the run was last resumed.
        skipped_steps: Steps that the GradScaler skipped because the gradient overflowed.
        epochs: Epochs; the last may be incomplete.
        loss: Last logged training loss; None if none was logged.
        seconds: Duration of the training, including validation.
        lr: The learning rate; of a schedule, its peak. None if it is not known.
        scheduled_steps: Steps of the whole run; None if they are not known.
        samples_per_step: Samples of an optimizer step over all ranks; None if they are not known.
        stopped_early: Why a callback stopped the training before its last step, or None.
    """

    steps: int
    steps_now: int
    skipped_steps: int
    epochs: int
    loss: float | None
    seconds: float
    lr: float | None = None
    scheduled_steps: int | None = None
    samples_per_step: int | None = None
    stopped_early: str | None = None


@dataclass
class Outcome:
    """What a run has computed.

    Attributes:
        weights: Weights of the network after the last step.
        clock: Times of the steps.
        trained: Metrics of the training, if the job trains.
        validation: Metrics of the last validation.
        test: Metrics of the test.
        examples: Samples that the report shows.
        data_sha256: The SHA-256 of the user's data, as their data module states it.
        inexact: Why the metrics depend on the number of ranks, each with the fix.
        evaluations: The commands `test` and `predict`, as far as the module and its data support them.
    """

    weights: Mapping[str, torch.Tensor]
    clock: StepClock
    trained: Trained | None = None
    validation: Mapping[str, Any] | None = None
    test: Mapping[str, Any] | None = None
    examples: Sequence[Any] = ()
    data_sha256: str | None = None
    inexact: list[str] = field(default_factory=list)
    evaluations: Sequence[str] = ("test", "predict")

    def add_inexact(self, reasons: Iterable[str]) -> None:
        """Adds reasons why an evaluation depends on the number of ranks."""
        self.inexact += [reason for reason in reasons if reason not in self.inexact]
