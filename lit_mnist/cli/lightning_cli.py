"""LightningCLI as the parser of Lightning's own options, such as callbacks given by `class_path`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jsonargparse import ArgumentError, Namespace, set_parsing_settings
from lightning.pytorch import callbacks, loggers
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
from lightning.pytorch.cli import LightningCLI

from lit_mnist.cli.plain_errors import explain
from lit_mnist.cli.trainer_options import ALLOWED, TrainerExtras
from lit_mnist.datamodule import MNISTDataModule
from lit_mnist.errors import InputError
from lit_mnist.experiment import DataSettings, Experiment
from lit_mnist.module import LitClassifier
from lit_mnist.trainer import LitTrainer
from lit_mnist.training.evaluation import VALIDATION_METRICS

_WEIGHTS = (
    "best.ckpt, the test and weights_sha256 are of the weights that are trained, and a resumed run would not have the "
    "averages: leave it out"
)
# Callbacks that would break a promise, with the reason and what to use instead.
_REJECTED: tuple[tuple[type[Callback], str], ...] = (
    (
        Checkpoint,
        "a run can be resumed because its checkpoints have one format and one folder: use --save-every and --keep",
    ),
    (
        GradientAccumulationScheduler,
        "the samples of a step are a function of the seed and the step alone, but it changes how many micro-batches "
        "form an optimizer step: use --trainer.accumulate_grad_batches",
    ),
    (WeightAveraging, _WEIGHTS),
    (StochasticWeightAveraging, _WEIGHTS),
    (
        LearningRateFinder,
        "config.yaml states the learning rate of a run, but it replaces that after a training of its own: use --lr",
    ),
    (
        BatchSizeFinder,
        "the samples of a step are a function of the seed and the step alone, but it replaces the batch size: use "
        "--batch-size",
    ),
    (ModelPruning, "a run can be resumed from its checkpoints, but it replaces the parameters: leave it out"),
    (
        BaseFinetuning,
        "a run can be resumed from its checkpoints, but it adds parameters to the optimizer: start from other weights "
        "by --model.weights",
    ),
)
_KNOWN = {
    "trainer.callbacks": [name for name in callbacks.__all__ if name != "Callback"],
    "trainer.logger": [name for name in loggers.__all__ if name != "Logger"],
}
# Those that Lightning makes by name, without xla, which is for TPUs.
_PROFILERS = ("simple", "advanced", "pytorch")


class OptionsParser(LightningCLI):
    """LightningCLI as a parser only: `instantiate_classes` does nothing.

    Attributes:
        allowed: The modules and packages whose classes may be named.
    """

    allowed: Sequence[str] = ALLOWED

    def parse_arguments(self, parser: Any, args: Any) -> None:
        """Parses the flags; raises an InputError with one message."""
        try:
            self.config = parser.parse_args(args)
        except ArgumentError as error:
            raise InputError(explain(str(error), known=_KNOWN, allowed=self.allowed)) from error
        except (ValueError, OSError, RecursionError) as error:
            raise InputError(f"The settings cannot be read: {' '.join(str(error).split())[:300]}.") from error

    def instantiate_classes(self) -> None:
        """Does nothing: the ranks instantiate the objects."""


class ExperimentCLI(OptionsParser):
    """The parser of the options that the experiment does not have.

    Args:
        words: Flags of the section `trainer`.
    """

    def __init__(self, words: Sequence[str]) -> None:
        # The names in a configuration are checked before anything is imported.
        set_parsing_settings(
            import_path_denylist=["*"], import_path_allowlist=list(ALLOWED), instantiate_subclass_spec_in_any=False
        )
        logging.getLogger("lightning.fabric.utilities.seed").setLevel(logging.WARNING)
        super().__init__(
            LitClassifier,
            MNISTDataModule,
            trainer_class=LitTrainer,
            save_config_callback=None,
            seed_everything_default=0,
            parser_kwargs={"exit_on_error": False, "allow_abbrev": False},
            args=list(words),
            run=False,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )


def make_trainer_options(names: Sequence[str], words: Sequence[str]) -> dict[str, Any]:
    """Instantiates further options of Lightning's Trainer.

    Args:
        names: The options.
        words: The flags that set them.

    Raises:
        InputError: An option is of the wrong type, or names a class that a configuration may not name.
    """
    cli = ExperimentCLI(words)
    for name in names:
        _check_callables(f"trainer.{name}", cli.config.trainer[name])
    made = cli.parser.instantiate_classes(cli.config)
    return {name: made["trainer"][name] for name in names}


def check_trainer_options(extras: TrainerExtras, experiment: Experiment) -> dict[str, Any]:
    """Instantiates further options once, to reject a wrong one before anything is written.

    Args:
        extras: The options.
        experiment: The experiment that they are used in.

    Returns:
        The options as plain values, as a configuration file states them.

    Raises:
        InputError: An option cannot be instantiated, or would break a promise.
    """
    try:
        made = make_trainer_options(extras.names, extras.words)
    except InputError:
        raise
    except Exception as error:
        # The message names the type of the option, such as Callback.
        name = next((name for name in extras.names if name.removesuffix("s") in str(error)), extras.names[0])
        raise InputError(explain(str(error), f"trainer.{name}")) from error
    _check_values(made)
    for callback in as_list(made.get("callbacks")):
        for kind, reason in _REJECTED:
            if isinstance(callback, kind):
                raise InputError(f"trainer.callbacks names {type(callback).__name__}: {reason}.")
        if isinstance(callback, EarlyStopping):
            _check_monitored(callback.monitor, experiment.data)
    config = ExperimentCLI(extras.words).config
    return {name: plain_value(config.trainer[name]) for name in extras.names}


def _check_values(made: Mapping[str, Any]) -> None:
    """Rejects values that Lightning accepts without effect, or that it notices only in the ranks."""
    for name, low in (("min_epochs", 0), ("min_steps", 0), ("num_sanity_val_steps", -1)):
        if (value := made.get(name)) is not None and value < low:
            raise InputError(f"trainer.{name} must be at least {low}, but is {value}.")
    for name in ("max_time", "val_check_interval"):
        value = made.get(name)
        if isinstance(value, int | float):
            if value <= 0 or (value > 1 and value % 1):
                raise InputError(f"trainer.{name} must be a number of batches or a share up to 1.0, but is {value}.")
        elif value is not None:
            try:
                Timer(duration=value)
            except Exception as error:
                raise InputError(f"trainer.{name} must be a time as DD:HH:MM:SS, but is {value}.") from error
    profiler = made.get("profiler")
    if isinstance(profiler, str) and profiler.lower() not in _PROFILERS:
        raise InputError(f"trainer.profiler must be one of {', '.join(_PROFILERS)}, or a class, but is {profiler}.")
    for logger in as_list(made.get("logger")):
        _check_writable("trainer.logger", getattr(logger, "save_dir", None))
    _check_writable("trainer.profiler", getattr(profiler, "dirpath", None))


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


def as_list(value: Any) -> list[Any]:
    """Returns the values of an option that is one value, several, or None."""
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def _check_monitored(metric: str, data: DataSettings) -> None:
    """Rejects an unknown metric, which Lightning would notice only after an epoch."""
    known = ("train_loss", "train_accuracy", *VALIDATION_METRICS)
    if data.val_size == 0 and metric.startswith("val_"):
        raise InputError(f"trainer.callbacks monitors {metric}, but data.val_size is 0: there is no validation.")
    if metric not in known:
        raise InputError(f"trainer.callbacks monitors {metric}, but the metrics are {', '.join(known)}.")


def plain_value(value: Any) -> Any:
    """Converts a parsed value back to a plain value of a configuration file."""
    if isinstance(value, Namespace):
        value = vars(value)
    if isinstance(value, dict):
        return {name: plain_value(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(part) for part in value]
    if isinstance(value, Enum):
        return value.name
    if callable(value):
        return f"{value.__module__}.{value.__qualname__}"
    return value if isinstance(value, bool | int | float | None) else str(value)


def _check_callables(key: str, value: Any) -> None:
    """Rejects callables of other modules, since the parser does not check where all of them come from."""
    if isinstance(value, Namespace):
        value = vars(value)
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        _check_callables(key, part)
    home = str(getattr(value, "__module__", None))
    if callable(value) and not any(f"{home}.".startswith(f"{module}.") for module in ALLOWED):
        raise InputError(f"{key} names {value}: a callable may be one of {', '.join(ALLOWED)} only.")
