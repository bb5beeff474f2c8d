"""The report of a run: `report.html` in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lit_mnist.report.metrics import write_metrics_report
from lit_mnist.report.page import Mistake, write_report
from lit_mnist.run.folder import REPORT
from lit_mnist.run.job import Job
from lit_mnist.run.metrics_log import read_metrics
from lit_mnist.run.outcome import Outcome
from lit_mnist.training.job import ExperimentJob


def report_metrics(job: Job, result: Mapping[str, Any], outcome: Outcome) -> None:
    """Writes the report of a run: a curve of each metric.

    Raises:
        OSError: The file cannot be written.
    """
    write_metrics_report(job.folder / REPORT, result=result, history=read_metrics(job.folder))


def report_experiment(job: Job, result: Mapping[str, Any], outcome: Outcome) -> None:
    """Writes the report of a run of the experiment, with the confusion matrix and examples of the test.

    Raises:
        OSError: The file cannot be written.
    """
    assert isinstance(job, ExperimentJob)
    split = job.splits.test
    mistakes = [
        Mistake(split.images[sample].numpy(), sample, int(split.labels[sample]), predicted, probability)
        for sample, predicted, probability in outcome.examples
    ]
    write_report(
        job.folder / REPORT,
        result=result,
        history=read_metrics(job.folder),
        mistakes=mistakes,
        class_names=job.dataset.class_names,
    )
