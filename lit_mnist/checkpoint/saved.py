"""A verified checkpoint with its settings, and the rules for resuming that hold for every module."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from lit_mnist.checkpoint.config import MAY_CHANGE, check_same_settings, flatten
from lit_mnist.checkpoint.format import FORMAT, SECTION, read_verified
from lit_mnist.distributed.rank import count_cores, print_once, threads_per_rank
from lit_mnist.distributed.terminal import display_path
from lit_mnist.errors import InputError

# The key of the best validation score among the states of the callbacks.
MANAGER_STATE = "KeepCheckpoints"
_MOST_THREADS = 1024


def make_section(
    *,
    engine: str,
    config: Mapping[str, Any],
    precision: str,
    threads: int,
    local_world_size: int,
    world_size: int,
    **experiment: Any,
) -> dict[str, Any]:
    """Returns the `lit_mnist` section of a checkpoint as plain values.

    Args:
        engine: Name of the engine.
        config: The resolved configuration.
        precision: The precision that is used.
        threads: Threads per rank.
        local_world_size: Number of ranks of this machine.
        world_size: Number of ranks over all machines.
        **experiment: What else a resume needs to know.
    """
    return {
        "format": FORMAT,
        "engine": engine,
        "config": json.loads(json.dumps(config)),
        "precision": precision,
        "threads": threads,
        "local_world_size": local_world_size,
        "world_size": world_size,
        **experiment,
    }


@dataclass(frozen=True)
class Saved:
    """A verified checkpoint with its settings.

    Attributes:
        path: The file.
        section: The `lit_mnist` section of the file; empty if it has none.
        config: The settings as nested plain values; empty if the file has none.
        step: Optimizer steps so far.
        epoch: Complete epochs so far.
        best: The best validation score so far; negative before the first validation, None if the run keeps none.
        sha256: The SHA-256 of the file; None if it has none and was not verified.
    """

    path: Path
    section: dict[str, Any]
    config: dict[str, Any]
    step: int
    epoch: int
    best: float | None
    sha256: str | None

    @classmethod
    def read(
        cls, path: Path, *, hashed: bool = True, check: Callable[[Mapping[str, Any]], None] = lambda _: None
    ) -> Self:
        """Reads and verifies a checkpoint.

        Args:
            path: The file.
            hashed: Whether a SHA-256 is required. A checkpoint of a stock `Trainer.save_checkpoint` has none.
            check: Checks the content further.

        Raises:
            InputError: The file is damaged, or not a checkpoint of a run.
        """
        checkpoint, sha256 = read_verified(path, hashed=hashed)
        check(checkpoint)
        if sha256 is None:
            print_once(
                f"note: {display_path(path.absolute())} was written by Trainer.save_checkpoint: it has no SHA-256, was "
                "not verified, and does not name the data that it was trained on"
            )
        step, epoch = checkpoint.get("global_step"), checkpoint.get("epoch", 0)
        if type(step) is not int or step < 0 or not isinstance(checkpoint.get("state_dict"), dict):
            raise InputError(f"{path} is not a checkpoint of a run: its step or its weights are missing or invalid.")
        section, config = cls._read_settings(path, checkpoint, resumes=hashed)
        return cls(path, section, config, step, epoch if type(epoch) is int else 0, _best_of(checkpoint), sha256)

    @classmethod
    def _read_settings(
        cls, path: Path, checkpoint: Mapping[str, Any], *, resumes: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the section of a checkpoint and its settings; both are empty if it has no section."""
        if SECTION not in checkpoint:
            return {}, {}
        section = checkpoint[SECTION]
        for name, kind in (("config", dict), ("precision", str), ("threads", int)):
            if type(section.get(name)) is not kind:
                raise InputError(f"{path} is not a checkpoint of a run: its {name} is missing or of another type.")
        if not 1 <= section["threads"] <= _MOST_THREADS:
            raise InputError(f"{path} is not a checkpoint of a run: it has {section['threads']} threads.")
        try:
            config: dict[str, Any] = json.loads(json.dumps(section["config"]))
        except (TypeError, ValueError) as error:
            raise InputError(f"{path} is not a checkpoint of a run: its settings are not plain values.") from error
        return section, config

    def is_in(self, folder: Path) -> bool:
        """Returns whether the file is in a folder."""
        return self.path.resolve().parent == folder.resolve()

    def threads(self, setting: int | None, ranks: int, report: Callable[[str], None]) -> int:
        """Returns the number of threads per rank of a resumed training run: by default the same as before.

        Args:
            setting: `run.threads` of the command line or of the first start, or None.
            ranks: Number of ranks of this machine.
            report: Receives a message if the number differs from before, or from the default of this machine.
        """
        if "threads" not in self.section:
            return threads_per_rank(setting, ranks)
        used, before = int(self.section["threads"]), self.section.get("local_world_size")
        before = before if isinstance(before, int) else None
        if setting is None and before == ranks:
            default = threads_per_rank(None, ranks)
            if default != used:
                report(
                    f"each rank uses {used} thread{'s' * (used != 1)}, as before; the default for {count_cores()} "
                    f"cores is {default}. --run.threads sets another number, but the result is then not bit-identical."
                )
            return used
        chosen = threads_per_rank(setting, ranks)
        if chosen != used:
            why = f"there were {before or 'another number of'} ranks per machine before, and here are {ranks}"
            why = f"run.threads is {setting}" if setting else why
            report(
                f"each rank uses {chosen} thread{'s' * (chosen != 1)}, but {used} before ({why}): the result is not "
                "bit-identical to that of an uninterrupted run."
            )
        return chosen

    def to_resume(self) -> dict[str, Any]:
        """Returns the settings that a resumed run keeps."""
        return self.config

    def check_same(self, config: Mapping[str, Any]) -> None:
        """Checks that a resumed run computes the same training.

        Args:
            config: The settings of the resumed run as nested plain values.

        Raises:
            InputError: A setting differs; the message has both values.
        """
        if self.config:
            check_same_settings(config, self.to_resume(), self.path)

    def check_best(self, path: Path) -> None:
        """Checks that a file is the best checkpoint of this training up to this checkpoint.

        Raises:
            InputError: The file is missing, damaged, newer, of another training run, or not of the best epoch.
        """
        best = type(self).read(path)
        if best.step > self.step:
            raise InputError(f"{path} was saved after step {best.step}, but the run resumes after step {self.step}.")
        mine, other = self._identity(), best._identity()
        for key in mine:
            if mine[key] != other.get(key):
                raise InputError(f"{path} is of another training run: its {key} is {other.get(key)}, not {mine[key]}.")
        # Every later checkpoint has the score of the best epoch.
        if best.best != self.best:
            raise InputError(f"{path} is not of the best epoch of the training run: it has another score.")

    def _identity(self) -> dict[str, Any]:
        """Returns the values that all checkpoints of a training run share."""
        # The initial weights belong to the training, although a resumed one need not find them.
        changing = tuple(name for name in MAY_CHANGE if name != "model.weights")
        return {
            key: value
            for key, value in flatten(self.to_resume())
            if not any(f"{key}.".startswith(f"{name}.") for name in changing)
        }


def _best_of(checkpoint: Mapping[str, Any]) -> float | None:
    callbacks = checkpoint.get("callbacks")
    kept = callbacks.get(MANAGER_STATE) if isinstance(callbacks, dict) else None
    best = kept.get("best") if isinstance(kept, dict) else None
    return best if isinstance(best, float) else None
