"""Checks further options of Lightning's Trainer, to reject a wrong one before anything is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    Checkpoint,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.callbacks.batch_size_finder import BatchSizeFinder

from lit_mnist.cli.plain_errors import explain
from lit_mnist.distributed.rank import warn_once
from lit_mnist.errors import InputError
from lit_mnist.experiment import DataSettings
from lit_mnist.plugins.exact_checkpoint import ExactCheckpoint
from lit_mnist.training.evaluation import VALIDATION_METRICS


class _Rejected(NamedTuple):
    """A callback that would break a promise, with the reason and what to use instead.

    Attributes:
        kind: Its class.
        reason: Why.
        user: Whether the promise is also that of a run of the user's classes.
        changes: Whether it changes what is trained.
    """

    kind: type[Callback]
    reason: str
    user: bool = False
    changes: bool = True


_WEIGHTS = (
    "best.ckpt, the test and weights_sha256 are of the weights that are trained, and a resumed run would not have the "
    "averages: remove it"
)
_REJECTED = (
    _Rejected(ExactCheckpoint, "the run has one already: use --save-every and --keep", user=True, changes=False),
    _Rejected(
        Checkpoint,
        "a run can be resumed because its checkpoints have one format and one folder: use --save-every and --keep",
        changes=False,
    ),
    _Rejected(
        GradientAccumulationScheduler,
        "the samples of a step are a function of the seed and the step alone, but it changes how many micro-batches "
        "form an optimizer step: use --trainer.accumulate_grad_batches",
    ),
    _Rejected(WeightAveraging, _WEIGHTS),
    _Rejected(StochasticWeightAveraging, _WEIGHTS),
    _Rejected(
        LearningRateFinder,
        "config.yaml states the learning rate of a run, but it replaces that: set it with --lr or an argument of the "
        "module",
        user=True,
    ),
    _Rejected(
        BatchSizeFinder,
        "config.yaml states the batch size of a run, but it replaces that: set it with --batch-size or an argument of "
        "the data",
        user=True,
    ),
    _Rejected(ModelPruning, "a run can be resumed from its checkpoints, but it replaces the parameters: remove it"),
    _Rejected(
        BaseFinetuning,
        "a run can be resumed from its checkpoints, but it adds parameters to the optimizer: start from other weights "
        "by --model.weights",
    ),
)
# Those that Lightning makes by name, without xla, which is for TPUs.
_PROFILERS = ("simple", "advanced", "pytorch")


def check_callback(kind: Any, *, user: bool) -> None:
    """Rejects the class of a callback that would break a promise.

    Args:
        kind: The class.
        user: Whether the run is one of the user's classes.

    Raises:
        InputError: It would break a promise.
    """
    for rejected in _REJECTED:
        if isinstance(kind, type) and issubclass(kind, rejected.kind) and (rejected.user or not user):
            raise InputError(f"trainer.callbacks names {kind.__name__}: {rejected.reason}.")


def check_same_callbacks(now: Any, before: Any, path: Path) -> None:
    """Compares the callbacks of a resumed training run of the user's classes with those in its checkpoint.

    Args:
        now: Its option `trainer.callbacks` as plain values.
        before: That in the checkpoint.
        path: The checkpoint, for the message.

    Raises:
        InputError: A callback of Lightning that changes the training differs. One of the user's is reported.
    """
    new, old = as_list(now), as_list(before)
    for entries, others, where in ((new, old, f"here, but not in {path}"), (old, new, f"in {path}, but not here")):
        for entry in entries:
            if entry in others:
                continue
            name = str(entry["class_path"] if isinstance(entry, Mapping) else entry)
            package, _, word = name.rpartition(".")
            kind = getattr(callbacks, word, None) if package in {"", callbacks.__name__} else None
            if any(isinstance(kind, type) and issubclass(kind, each.kind) for each in _REJECTED if each.changes):
                raise InputError(
                    f"trainer.callbacks has {json.dumps(entry)} {where}, which changes the training: remove "
                    "--trainer.callbacks to keep those of the checkpoint, or name the same ones and add others."
                )
            if kind is None:
                warn_once(
                    f"trainer.callbacks has {json.dumps(entry)} {where}: the resumed run is not bit-identical to an "
                    "uninterrupted one if this callback changes the training."
                )


def check_values(options: Mapping[str, Any]) -> None:
    """Rejects values that Lightning accepts without effect, or that it notices only in the ranks.

    Args:
        options: The options, parsed.

    Raises:
        InputError: A value is out of range.
    """
    for name, low in (("min_epochs", 0), ("min_steps", 0), ("num_sanity_val_steps", -1)):
        if (value := options.get(name)) is not None and value < low:
            raise InputError(f"trainer.{name} must be at least {low}, but is {value}.")
    for name in ("max_time", "val_check_interval"):
        value = options.get(name)
        if isinstance(value, int | float):
            if value <= 0 or (value > 1 and value % 1):
                raise InputError(f"trainer.{name} must be a number of batches or a share up to 1.0, but is {value}.")
        elif value is not None:
            try:
                Timer(duration=value)
            except Exception as error:
                raise InputError(f"trainer.{name} must be a time as DD:HH:MM:SS, but is {value}.") from error
    profiler = options.get("profiler")
    if isinstance(profiler, str) and profiler.lower() not in _PROFILERS:
        raise InputError(f"trainer.profiler must be one of {', '.join(_PROFILERS)}, or a class, but is {profiler}.")


def check_objects(make: Callable[[], dict[str, Any]], names: tuple[str, ...], data: DataSettings | None = None) -> None:
    """Makes the options once, and rejects those that cannot be made, or cannot write their output.

    Args:
        make: Instantiates the options.
        names: Their names.
        data: The data of the experiment, whose metrics are known; None for a user's module.

    Raises:
        InputError: An option cannot be instantiated, monitors an unknown metric, or cannot write its output.
    """
    try:
        made = make()
    except InputError:
        raise
    except Exception as error:
        # The message names the type of the option, such as Callback.
        name = next((name for name in names if name.removesuffix("s") in str(error)), names[0])
        raise InputError(explain(str(error), f"trainer.{name}")) from error
    for logger in as_list(made.get("logger")):
        _check_writable("trainer.logger", getattr(logger, "save_dir", None))
    _check_writable("trainer.profiler", getattr(made.get("profiler"), "dirpath", None))
    for callback in as_list(made.get("callbacks")):
        if data and isinstance(callback, EarlyStopping):
            _check_monitored(callback.monitor, data)


def as_list(value: Any) -> list[Any]:
    """Returns the values of an option that is one value, several, or None."""
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def _check_writable(key: str, folder: str | Path | None) -> None:
    """Rejects an output folder in which nothing can be made; a URL is not checked."""
    if folder is None or "://" in str(folder):
        return
    path = Path(folder).absolute()
    try:
        with TemporaryDirectory(dir=next(parent for parent in (path, *path.parents) if parent.exists())):
            pass
    except OSError as error:
        raise InputError(f"{key} writes into {folder}, which is not possible: {error.strerror}.") from error


def _check_monitored(metric: str, data: DataSettings) -> None:
    """Rejects an unknown metric, which Lightning would notice only after an epoch."""
    known = ("train_loss", "train_accuracy", *VALIDATION_METRICS)
    if data.val_size == 0 and metric.startswith("val_"):
        raise InputError(f"trainer.callbacks monitors {metric}, but data.val_size is 0: there is no validation.")
    if metric not in known:
        raise InputError(f"trainer.callbacks monitors {metric}, but the metrics are {', '.join(known)}.")
