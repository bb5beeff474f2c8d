"""The policy for the further options of Lightning's Trainer: accepted, or rejected with an alternative."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lit_mnist.errors import InputError

# A configuration may name classes of these modules. Others could start processes, open ports, or write anywhere.
ALLOWED = (
    "lightning.pytorch.callbacks",
    "lightning.pytorch.loggers",
    "lightning.pytorch.profilers",
    "lit_mnist.callbacks",
    "torch.nn",
    "torch.optim",
)
PACKAGES = ("lightning", "torch", "lit_mnist")


class Policy(NamedTuple):
    """The policy for one option of Lightning's Trainer.

    Attributes:
        default: Lightning's default, which is always accepted.
        reason: Why other values are rejected, and what to use instead; None if they are accepted.
        every_engine: Whether all engines accept it, not only the engine lightning.
    """

    default: Any
    reason: str | None = None
    every_engine: bool = False


_ORDER = "the samples of a step are a function of the seed and the step alone"

# Every option of Lightning's Trainer that is not in `TrainerSettings`.
POLICY = {
    # Observe.
    "logger": Policy(None, every_engine=True),
    "callbacks": Policy(None),
    "profiler": Policy(None),
    "enable_model_summary": Policy(None),
    "detect_anomaly": Policy(False),
    "benchmark": Policy(None),
    "num_sanity_val_steps": Policy(None),
    "enable_autolog_hparams": Policy(True),
    "inference_mode": Policy(True),
    # Shorten.
    "max_time": Policy(None),
    "min_epochs": Policy(None),
    "min_steps": Policy(None),
    "val_check_interval": Policy(None),
    # Have another name here.
    "default_root_dir": Policy(None, "all output goes to the run folder: use --run-dir"),
    "timeout": Policy(120.0, "use --run.timeout"),
    "exact_evaluation": Policy(True, "every evaluation of this project is exact on any number of ranks: remove it"),
    "enable_checkpointing": Policy(
        None,
        "the last and the best checkpoint are always kept, so that a run can be resumed: see --save-every and --keep",
    ),
    # Would break a promise.
    "barebones": Policy(False, "it turns off checkpoints and metrics, which every run writes: leave it out"),
    "gradient_clip_algorithm": Policy(
        None,
        "every engine clips the gradient by its norm, and all compute the same: use --trainer.gradient_clip_val",
    ),
    "use_distributed_sampler": Policy(True, f"{_ORDER}: leave it out"),
    "reload_dataloaders_every_n_epochs": Policy(0, f"{_ORDER}: leave it out"),
    "plugins": Policy(
        None,
        "the precision, the batch norm and the checkpoint format are plugins already: use --precision or "
        "--trainer.sync_batchnorm",
    ),
    "model_registry": Policy(None, "it uploads checkpoints: leave it out"),
}


@dataclass(frozen=True)
class TrainerExtras:
    """Further options of Lightning's Trainer, such as callbacks, which each rank instantiates.

    Attributes:
        names: The options.
        words: The flags that set them, for LightningCLI.
    """

    names: tuple[str, ...] = ()
    words: tuple[str, ...] = ()

    @property
    def for_lightning(self) -> tuple[str, ...]:
        """The options that only the engine lightning accepts."""
        return tuple(name for name in self.names if not POLICY[name].every_engine)


def is_trainer_option(key: str) -> bool:
    """Returns whether a dotted key is a further option of Lightning's Trainer, or a part of one."""
    section, _, rest = key.partition(".")
    return section == "trainer" and rest.partition(".")[0].removesuffix("+") in POLICY


def read_extras(pairs: Iterable[tuple[str, Any]]) -> TrainerExtras:
    """Checks further options of Lightning's Trainer without importing it.

    Args:
        pairs: Dotted keys with the text of a flag, or the value of a file.

    Raises:
        InputError: An option is rejected by its policy, or names a class that a configuration may not name.
    """
    names: dict[str, None] = {}
    words: list[str] = []
    for key, value in pairs:
        name = key.partition(".")[2].partition(".")[0].removesuffix("+")
        parsed = _parsed(value)
        if f"trainer.{name}" == key and parsed == POLICY[name].default:
            continue
        if f"trainer.{name}" == key.removesuffix("+"):
            check_no_file(key, parsed)
        for path in _class_paths(parsed):
            _check_class(f"trainer.{name}", path)
        if (reason := POLICY[name].reason) is not None:
            raise InputError(f"trainer.{name} is not accepted: {reason}.")
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


def check_no_file(key: str, value: Any) -> None:
    """Rejects the name of a file, which LightningCLI would read instead, even from a pipe."""
    for part in value if isinstance(value, list) else [value]:
        try:
            is_file = isinstance(part, str) and "\0" not in part and Path(part).exists()
        except OSError:
            continue
        if is_file:
            raise InputError(f"{key} names the file {part}: give the settings themselves.")


def _class_paths(value: Any) -> Iterator[str]:
    """Yields the dotted names of classes and functions in an option's value."""
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
