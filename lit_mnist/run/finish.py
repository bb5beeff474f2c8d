"""The end of a job: result, report, predictions and the summary on the screen, all by rank 0."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lit_mnist.data.digits.idx import Split
from lit_mnist.data.segmentation.images import SegmentationSplit, read_image, read_mask, resized
from lit_mnist.distributed.gather import all_gather_json
from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.terminal import print_line, shown
from lit_mnist.errors import NonFiniteError
from lit_mnist.predict.masks import MASKS, OVERLAYS, PredictedMask, write_mask_table, write_masks
from lit_mnist.report.page import Mistake, write_report
from lit_mnist.report.segmentation import ShownImage
from lit_mnist.run.folder import REPORT, RESULT, RunFolder
from lit_mnist.run.metrics_log import read_metrics
from lit_mnist.run.result import Trained, build_result, total_gpu_memory, total_memory
from lit_mnist.run.timing import StepClock
from lit_mnist.training.evaluation import Evaluation
from lit_mnist.training.examples import Example, Wrong
from lit_mnist.training.extremes import Scored
from lit_mnist.training.job import Job

PREDICTIONS, GRID = "predictions.csv", "predictions.png"
# Indices, predicted classes and their probabilities, each [batch]; of scenes the classes are [batch, height, width].
Prediction = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def finish(
    job: Job,
    rank: Rank,
    *,
    device: torch.device,
    weights: Mapping[str, torch.Tensor],
    clock: StepClock,
    trained: Trained | None,
    validation: Evaluation | None,
    test: Evaluation | None,
    examples: list[Example],
) -> None:
    """Writes what the job has come to; every rank must call it.

    Args:
        job: The job.
        rank: This rank.
        device: Its device.
        weights: The bare network's weights after the last step.
        clock: Times of the steps.
        trained: Figures of the training, where there was one.
        validation: The last evaluation on the validation split.
        test: The evaluation on the test split.
        examples: What is shown of the test.
    """
    memory = total_memory(clock, rank, device, job.first_process)
    # nn.DataParallel is one rank on several GPUs.
    gpus = job.devices.numbers if job.devices.count > rank.local_world_size else [device]
    gpu_memory = total_gpu_memory(rank, device, gpus)
    if not rank.is_first or job.command == "predict":
        return
    result = build_result(
        job,
        world_size=rank.world_size,
        device=device,
        weights=weights,
        clock=clock,
        memory=memory,
        gpu_memory=gpu_memory,
        trained=trained,
        validation=validation,
        test=test,
    )
    RunFolder(job.folder).write_result(result)
    write_report(
        job.folder / REPORT,
        result=result,
        history=read_metrics(job.folder),
        mistakes=_mistakes(job, examples),
        class_names=job.dataset.class_names,
        segmentation=_scenes(job, examples),
    )
    _summarise(job, rank, trained, validation, test)


def _mistakes(job: Job, examples: list[Example]) -> list[Mistake]:
    """Returns the surest of the digits classified wrongly, for the report."""
    split = job.splits.test
    if isinstance(split, SegmentationSplit):
        return []
    wrong = [example for example in examples if isinstance(example, Wrong)]
    return [
        Mistake(split.images[index].numpy(), index, int(split.labels[index]), predicted, probability)
        for index, predicted, probability in wrong
    ]


def _scenes(job: Job, examples: list[Example]) -> list[ShownImage]:
    """Returns the best and worst scenes, for the report, as the network saw them."""
    split, data = job.splits.test, job.experiment.data
    if not isinstance(split, SegmentationSplit):
        return []
    shown = []
    for example in examples:
        if isinstance(example, Scored):
            path = split.images[example.sample]
            truth = read_mask(
                split.masks[example.sample], job.dataset.num_classes, border_is_class=data.border == "class"
            )
            image, true = resized(read_image(path), truth, data.image_size)
            pixels, classes = np.asarray(image), np.asarray(true)
            shown.append(ShownImage(pixels, classes, example.mask, path.stem, example.sample, example.score))
    return shown


def _summarise(
    job: Job, rank: Rank, trained: Trained | None, validation: Evaluation | None, test: Evaluation | None
) -> None:
    ranks = f"{rank.world_size} rank{'s' * (rank.world_size != 1)}"
    print_line()
    if trained:
        skipped = f", {trained.skipped_steps} left out by the GradScaler" if trained.skipped_steps else ""
        steps = f"{trained.steps_now} step{'s' * (trained.steps_now != 1)}"
        before = trained.steps - trained.steps_now
        since = f" since the resume after step {before}" if before else ""
        print_line(f"trained   {steps} on {ranks}, {job.precision}, in {trained.seconds:.1f} s{since}{skipped}")
        if trained.stopped_early:
            print_line(f"stopped early: {trained.stopped_early}")
    for name, evaluation in (("validated", validation if not test else None), ("tested", test)):
        if evaluation and evaluation.mean_iou is not None:
            print_line(
                f"{name:<9} mean IoU {evaluation.mean_iou:.2%}, pixel accuracy {evaluation.accuracy:.2%} "
                f"({evaluation.count} scenes), loss {evaluation.loss:.4f}"
            )
        elif evaluation:
            right = sum(evaluation.confusion[i][i] for i in range(len(evaluation.confusion)))
            share = f"{evaluation.accuracy:.2%} ({right} of {evaluation.count})"
            print_line(f"{name:<9} {share}, loss {evaluation.loss:.4f}")
    print_line(f"results   {shown(job.folder / RESULT)}, {shown(job.folder / REPORT)}")
    if trained:
        folder, command = shlex.quote(shown(job.folder)), program(job.engine)
        model, trainer = job.experiment.model, job.experiment.trainer
        stretchable = model.schedule == "constant" and not model.warmup
        if job.resumable and stretchable and trained.steps == job.plan.total_steps:
            unlimited = "" if trainer.max_steps == -1 else " --max-steps -1"
            print_line(f"go on     {command} fit --resume {folder} --epochs {trained.epochs + 1}{unlimited}")
        print_line(f"test      {command if job.testable else program()} test --ckpt {folder}")


def program(engine: str = "lightning") -> str:
    """Returns how this program is called on the command line, with an engine of its own."""
    if engine != "lightning":
        return f"python -m lit_mnist.engines.{engine}"
    script = Path(sys.argv[0])
    return f"python {shlex.quote(sys.argv[0])}" if script.name == "train.py" else "lit-mnist"


def write_predictions(job: Job, rank: Rank, batches: Iterable[Prediction]) -> None:
    """Writes one ordered table of all ranks' predictions, and images; every rank must call it.

    Of digits, rank 0 draws the first; of scenes, each rank writes masks and overlays of those that it has predicted.

    Args:
        job: The job.
        rank: This rank.
        batches: This rank's predictions.
    """
    if isinstance(job.splits.test, SegmentationSplit):
        _write_masks(job, rank, job.splits.test, batches)
        return
    rows = [
        (index, predicted, probability)
        for batch in batches
        for index, predicted, probability in zip(*(figures.tolist() for figures in batch), strict=True)
    ]
    rows = sorted((int(index), int(predicted), float(probability)) for index, predicted, probability in _gathered(rows))
    _check_finite(probability for _, _, probability in rows)
    if not rank.is_first:
        return
    from lit_mnist.predict.answers import answers
    from lit_mnist.predict.doubts import doubts
    from lit_mnist.predict.grid import draw_grid
    from lit_mnist.predict.table import write_table

    split, files, names = job.splits.test, job.files, job.dataset.class_names
    assert [index for index, _, _ in rows] == list(range(len(split)))
    predicted = torch.tensor([row[1] for row in rows])
    probability = torch.tensor([row[2] for row in rows])
    labels, notes = None if files else split.labels, None
    if files:
        assert isinstance(job.dataset.train, Split)
        notes = doubts(split.images, predicted, probability, job.dataset.train)
    write_table(job.folder / PREDICTIONS, predicted, probability, labels=labels, files=files or None, notes=notes)
    draw_grid(
        job.folder / GRID,
        split.images,
        predicted,
        probability,
        labels=labels,
        class_names=names,
        files=files or None,
        notes=notes,
    )
    for line in answers(files, predicted.tolist(), probability.tolist(), notes, names) if notes else ():
        print_line(line)
    places = ", ".join(shown(job.folder / name) for name in (PREDICTIONS, GRID))
    print_line(f"predicted {len(rows)} image{'s' * (len(rows) != 1)}: {places}")


def _write_masks(job: Job, rank: Rank, scenes: SegmentationSplit, batches: Iterable[Prediction]) -> None:
    own = write_masks(job.folder, scenes, batches, job.experiment.data)
    rows = sorted(PredictedMask(*row) for row in _gathered(own))
    _check_finite(row.probability for row in rows)
    if not rank.is_first:
        return
    assert [row.sample for row in rows] == list(range(len(scenes)))
    write_mask_table(job.folder / PREDICTIONS, rows, scenes.images, job.dataset.class_names)
    places = ", ".join(shown(job.folder / name) for name in (PREDICTIONS, MASKS, OVERLAYS))
    print_line(f"predicted {len(rows)} image{'s' * (len(rows) != 1)}: {places}")


def _gathered(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Returns the rows of all ranks, each of which begins with a sample's number."""
    return [row for part in all_gather_json(rows) for row in part]


def _check_finite(probabilities: Iterable[float]) -> None:
    if not all(map(math.isfinite, probabilities)):
        raise NonFiniteError("The network's outputs are not finite: the training of this checkpoint has diverged.")
