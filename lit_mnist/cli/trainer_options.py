"""The further options of Lightning's Trainer: which are accepted, and what to use in place of the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import yaml

from lit_mnist.errors import InputError

# The parts of these packages whose classes only take part in a training: others start processes, listen or write files.
PACKAGES = ("lightning", "torch", "lit_mnist")
ALLOWED = ("lightning.pytorch.callbacks", "lit_mnist.callbacks", "torch.nn", "torch.optim")


class Policy(NamedTuple):
    """What becomes of an option of Lightning's Trainer.

    Attributes:
        default: Lightning's default, which is accepted for every option.
        instead: Why another value is rejected, and what to use instead; None if it is accepted.
    """

    default: Any
    instead: str | None = None


# Every option of Lightning's Trainer that is not one of the project's own `trainer.*`.
POLICY = {
    "callbacks": Policy(None),
    "detect_anomaly": Policy(False),
    "benchmark": Policy(None),
    "logger": Policy(None, "metrics.csv and TensorBoard files are always written"),
    "profiler": Policy(None, "use --run.trace times"),
    "log_every_n_steps": Policy(None, "metrics are logged every 50 steps"),
    "enable_progress_bar": Policy(None, "the progress is one line"),
    "enable_model_summary": Policy(None, "leave it out"),
    "barebones": Policy(False, "the progress and the checkpoints are part of each run"),
    "fast_dev_run": Policy(False, "use --max-steps 1"),
    "limit_train_batches": Policy(None, "use --data.train_size or --max-steps"),
    "limit_val_batches": Policy(None, "use --data.val_size"),
    "limit_test_batches": Policy(None, "use --data.test_size"),
    "limit_predict_batches": Policy(None, "use --data.test_size"),
    "overfit_batches": Policy(0.0, "use --data.train_size"),
    "max_time": Policy(None, "use --max-steps"),
    "min_epochs": Policy(None, "use --epochs"),
    "min_steps": Policy(None, "use --max-steps"),
    "check_val_every_n_epoch": Policy(1, "the best epoch is chosen among all"),
    "val_check_interval": Policy(None, "each epoch ends with a validation"),
    "num_sanity_val_steps": Policy(None, "the data are verified before the ranks start"),
    "enable_checkpointing": Policy(None, "the last and the best epoch are always kept"),
    "gradient_clip_algorithm": Policy(None, "the gradient is clipped by its norm"),
    "inference_mode": Policy(True, "leave it out"),
    "use_distributed_sampler": Policy(True, "the ranks share each batch by the project's own order"),
    "reload_dataloaders_every_n_epochs": Policy(0, "the order follows the epoch by itself"),
    "plugins": Policy(None, "precision and batch norm are plugins already"),
    "default_root_dir": Policy(None, "use --run-dir"),
    "timeout": Policy(120.0, "use --run.timeout"),
    "enable_autolog_hparams": Policy(True, "leave it out"),
    "model_registry": Policy(None, "leave it out"),
}


@dataclass(frozen=True)
class TrainerExtras:
    """Further options of Lightning's Trainer, such as callbacks: named here, made in each rank.

    Attributes:
        names: The options.
        words: The flags that set them, as LightningCLI reads them.
    """

    names: tuple[str, ...] = ()
    words: tuple[str, ...] = ()


def is_trainer_option(key: str) -> bool:
    """Returns whether a dotted key is one of Lightning's Trainer alone, or a part of one."""
    section, _, rest = key.partition(".")
    return section == "trainer" and rest.partition(".")[0].removesuffix("+") in POLICY


def read_extras(pairs: Iterable[tuple[str, Any]]) -> TrainerExtras:
    """Returns the further options that are accepted.

    Args:
        pairs: Dotted keys with the text of a flag, or the value of a file.

    Raises:
        InputError: An option would break a promise, or names a class that a configuration may not name.
    """
    names: dict[str, None] = {}
    words: list[str] = []
    for key, value in pairs:
        name = key.partition(".")[2].partition(".")[0].removesuffix("+")
        parsed = _parsed(value)
        if f"trainer.{name}" == key and parsed == POLICY[name].default:
            continue
        for path in _class_paths(parsed):
            _check_class(f"trainer.{name}", path)
        if (instead := POLICY[name].instead) is not None:
            raise InputError(f"trainer.{name} is not accepted here, since it would change what is promised: {instead}.")
        names[name] = None
        text = value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True, width=10**6).strip()
        words.append(f"--{key}={text}" if value is not None else f"--{key}")
    return TrainerExtras(tuple(names), tuple(words))


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return value


def _class_paths(value: Any) -> Iterator[str]:
    """Gives the dotted names of classes and functions in an option's value."""
    if isinstance(value, str) and "." in value and not value.startswith("."):
        yield value
    elif isinstance(value, dict):
        if isinstance(path := value.get("class_path"), str):
            yield path
    elif isinstance(value, list):
        for part in value:
            yield from _class_paths(part)


def _check_class(key: str, path: str) -> None:
    """Rejects a class outside the allowed modules, before anything is imported."""
    allowed = any(f"{path}.".startswith(f"{module}.") for module in ALLOWED)
    if "." in path and not allowed:
        of = f", and of these {', '.join(ALLOWED)}" if path.partition(".")[0] in PACKAGES else ""
        raise InputError(f"{key} names {path}: a configuration may name classes of {', '.join(PACKAGES)} only{of}.")
