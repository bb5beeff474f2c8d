"""The end of a job: the best weights, and rank 0's result, report, predictions and summary on the terminal."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from lit_mnist.checkpoint.format import BEST, read_checkpoint
from lit_mnist.checkpoint.state import net_weights
from lit_mnist.distributed.gather import all_gather_json
from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.terminal import display_path, print_line
from lit_mnist.errors import NonFiniteError
from lit_mnist.predict import Prediction, digits
from lit_mnist.report.page import Mistake, write_report
from lit_mnist.run.folder import REPORT, RESULT, RunFolder
from lit_mnist.run.metrics_log import Logger, read_metrics
from lit_mnist.run.result import Trained, build_result, total_gpu_memory, total_memory
from lit_mnist.run.timing import StepClock
from lit_mnist.training.evaluation import Evaluation, name_metrics
from lit_mnist.training.examples import Wrong
from lit_mnist.training.job import Job

__all__ = ["Prediction", "finish", "program", "write_predictions"]


def finish(
    job: Job,
    rank: Rank,
    *,
    weights: Mapping[str, torch.Tensor],
    clock: StepClock,
    trained: Trained | None,
    validation: Evaluation | None,
    test: Evaluation | None,
    loggers: Sequence[Logger] = (),
) -> None:
    """Writes the result and the report, and prints the summary; every rank must call it.

    Args:
        job: The job.
        rank: This rank.
        weights: Weights of the bare network after the last step.
        clock: Times of the steps.
        trained: Metrics of the training, if the job trains.
        validation: The last evaluation on the validation split.
        test: The evaluation on the test split, with its examples.
        loggers: Loggers of this rank that no Trainer closes.
    """
    device = job.devices.of(rank)
    for logger in loggers:
        if test:
            logger.log_metrics(name_metrics(test, "test"), trained.steps if trained else 0)
        logger.finalize("success")
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
        mistakes=_load_mistakes(job, test.examples if test else []),
        class_names=job.dataset.class_names,
    )
    _summarize(job, rank, trained, validation, test)


def load_best_weights(job: Job, rank: Rank, net: nn.Module) -> None:
    """Loads the best weights of the run; every rank must call it. Only rank 0 can rely on the file being there."""
    if rank.is_first:
        net.load_state_dict(net_weights(read_checkpoint(job.folder / "checkpoints" / BEST)))
    if rank.world_size > 1:
        for tensor in net.state_dict().values():
            dist.broadcast(tensor, src=0)


def _load_mistakes(job: Job, examples: Sequence[Wrong]) -> list[Mistake]:
    split = job.splits.test
    return [
        Mistake(split.images[sample].numpy(), sample, int(split.labels[sample]), predicted, probability)
        for sample, predicted, probability in examples
    ]


def _summarize(
    job: Job, rank: Rank, trained: Trained | None, validation: Evaluation | None, test: Evaluation | None
) -> None:
    ranks = f"{rank.world_size} rank{'s' * (rank.world_size != 1)}"
    print_line()
    if trained:
        skipped = f", {trained.skipped_steps} skipped by the GradScaler" if trained.skipped_steps else ""
        steps = f"{trained.steps_now} step{'s' * (trained.steps_now != 1)}"
        before = trained.steps - trained.steps_now
        since = f" since the resume after step {before}" if before else ""
        print_line(f"trained   {steps} on {ranks}, {job.precision}, in {trained.seconds:.1f} s{since}{skipped}")
        if trained.stopped_early:
            print_line(f"stopped early: {trained.stopped_early}")
    for name, evaluation in (("validated", validation if not test else None), ("tested", test)):
        if evaluation:
            right = sum(evaluation.confusion[i][i] for i in range(len(evaluation.confusion)))
            share = f"{evaluation.accuracy:.2%} ({right} of {evaluation.count})"
            print_line(f"{name:<9} {share}, loss {evaluation.loss:.4f}")
    print_line(f"results   {display_path(job.folder / RESULT)}, {display_path(job.folder / REPORT)}")
    if trained:
        folder, command = shlex.quote(display_path(job.folder)) + job.import_flag, program(job.engine)
        model, trainer = job.experiment.model, job.experiment.trainer
        stretchable = model.schedule == "constant" and not model.warmup
        if job.resumable and stretchable and trained.steps == job.plan.total_steps:
            unlimited = "" if trainer.max_steps == -1 else " --max-steps -1"
            print_line(f"continue  {command} fit --resume {folder} --epochs {trained.epochs + 1}{unlimited}")
        print_line(f"test      {command if job.testable else program()} test --ckpt {folder}")


def program(engine: str = "lightning") -> str:
    """Returns the command that starts an engine."""
    if engine != "lightning":
        return f"python -m lit_mnist.engines.{engine}"
    script = Path(sys.argv[0])
    return f"python {shlex.quote(sys.argv[0])}" if script.name == "train.py" else "lit-mnist"


def write_predictions(job: Job, rank: Rank, batches: Iterable[Prediction]) -> None:
    """Writes the predictions of all ranks as one table and one image; every rank must call it.

    Args:
        job: The job.
        rank: This rank.
        batches: The predictions of this rank.

    Raises:
        InputError: A file cannot be written.
        NonFiniteError: A probability is not finite.
    """
    rows = sorted(row for part in all_gather_json(digits.collect_rows(batches)) for row in part)
    if not all(math.isfinite(row[1]) for row in rows):
        raise NonFiniteError("The outputs of the network are not finite: the training behind this checkpoint diverged.")
    if rank.is_first:
        assert [row[0] for row in rows] == list(range(len(job.splits.test)))
        places = ", ".join(display_path(job.folder / name) for name in digits.write(job, rows))
        print_line(f"predicted {len(rows)} image{'s' * (len(rows) != 1)}: {places}")
