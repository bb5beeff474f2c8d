"""Predictions of the test set or of a user's images."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lit_mnist.distributed.terminal import display_path, print_labelled, print_line
from lit_mnist.errors import NonFiniteError
from lit_mnist.run.finish import evaluate_with

if TYPE_CHECKING:
    from lit_mnist.distributed.rank import Rank
    from lit_mnist.training.evaluation import Prediction
    from lit_mnist.training.job import ExperimentJob


def write_predictions(job: ExperimentJob, rank: Rank, batches: Iterable[Prediction]) -> None:
    """Writes the predictions of all ranks as one table, and the predicted images; every rank must call it.

    Args:
        job: The job.
        rank: This rank.
        batches: The predictions of this rank.

    Raises:
        InputError: A file cannot be written.
        NonFiniteError: A probability is not finite.
    """
    from lit_mnist.distributed.gather import all_gather_json
    from lit_mnist.predict import digits

    rows = sorted(row for part in all_gather_json(digits.collect_rows(batches)) for row in part)
    if not all(math.isfinite(row[1]) for row in rows):
        raise NonFiniteError("The outputs of the network are not finite: the training behind this checkpoint diverged.")
    if rank.is_first:
        assert [row[0] for row in rows] == list(range(len(job.splits.test)))
        places = ", ".join(display_path(job.folder / name) for name in digits.write(job, rows))
        print_line()
        print_labelled("predicted", f"{len(rows)} image{'s' * (len(rows) != 1)}")
        print_labelled("results", places)
        print_labelled("export", f"{evaluate_with(job, 'export')} --to onnx")
