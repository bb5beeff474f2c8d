"""The typed request of a command line and the configuration files that it names.

A flag overrides a file, a later file overrides an earlier one, and both override the defaults. What trains is the
project's experiment, or a LightningModule of the user that a configuration names by `class_path` and `init_args`, as
for LightningCLI in subclass mode. Only the packages of `--import` may import torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_mnist.checkpoint.path import require_checkpoint
from lit_mnist.cli.class_names import ALLOWED, parse_text
from lit_mnist.cli.config_file import find_config, read_config_file
from lit_mnist.cli.flags import CKPT_PATH, COMMAND_FLAGS, EVALUATING
from lit_mnist.cli.merge import Given, Merge
from lit_mnist.cli.trainer_options import POLICY, option_name
from lit_mnist.cli.words import CONFIG_FLAGS, split_command, split_flags
from lit_mnist.errors import InputError
from lit_mnist.experiment import Experiment
from lit_mnist.experiment.checks import check_experiment
from lit_mnist.experiment.schema import make_experiment
from lit_mnist.run.imports import import_packages, split_imports

_DOTTED = re.compile(r"\w+(\.\w+)+")


@dataclass(frozen=True)
class Request:
    """What a command line and its configuration files ask for.

    Attributes:
        command: The command.
        settings: The given settings of the dataclasses, converted, by dotted keys.
        given: What LightningCLI parses.
        classes: The `class_path` of `model` and `data`; empty for the project's experiment.
        flags: The values of the flags that only this command has.
        images: The user's images to predict.
        imports: The user's packages, whose classes a configuration may name.
    """

    command: Any
    settings: Mapping[str, Any]
    given: tuple[Given, ...] = ()
    classes: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    images: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()

    @property
    def trains(self) -> bool:
        """Whether the command trains."""
        return self.command not in EVALUATING

    @property
    def checkpoint(self) -> str | None:
        """The run folder or checkpoint to evaluate."""
        return self.flags.get("--ckpt")

    @property
    def resume(self) -> str | None:
        """The run folder or checkpoint to resume from; `auto` resumes from `run_dir` if it contains a checkpoint."""
        return self.settings.get("run.resume")

    @property
    def run_dir(self) -> str | None:
        """The run folder."""
        return self.settings.get("run.dir")

    @property
    def options(self) -> tuple[str, ...]:
        """The names of the further options of Lightning's Trainer."""
        keys = [each.key for each in self.given if each.key.startswith("trainer.")]
        return tuple(dict.fromkeys(map(option_name, keys)))

    @property
    def options_of_lightning(self) -> tuple[str, ...]:
        """The further options that only the engine lightning accepts."""
        return tuple(name for name in self.options if not POLICY[name].every_engine)

    @property
    def allowed(self) -> tuple[str, ...]:
        """The modules and packages whose classes the request may name."""
        return (*ALLOWED, *self.imports)

    def section(self, name: str) -> dict[str, Any]:
        """Returns the given settings of a section."""
        return {key.partition(".")[2]: value for key, value in self.settings.items() if key.startswith(f"{name}.")}

    def check(self) -> None:
        """Checks what needs neither data nor torch, whose import takes seconds; the run checks everything.

        Raises:
            InputError: A value is out of range, or the named checkpoint does not exist.
        """
        # A restarted run resumes from its own folder, even if what it was started from is gone.
        named = self.checkpoint or (self.resume if self.run_dir is None and self.resume != "auto" else None)
        if named is not None:
            require_checkpoint(Path(named))
        elif self.trains and self.resume is None and not self.classes:
            self.experiment()

    def experiment(self, base: Mapping[str, Any] | None = None) -> Experiment:
        """Returns the experiment.

        Args:
            base: Nested settings that replace the defaults.

        Raises:
            InputError: A value is out of range, or contradicts another.
        """
        experiment = make_experiment(self.settings, base)
        check_experiment(experiment)
        return experiment


def parse(argv: Sequence[str], engine: str = "lightning") -> Request:
    """Parses a command line and the configuration files that it names.

    Args:
        argv: The arguments.
        engine: Name of the engine; messages suggest only its options.

    Raises:
        InputError: A flag, key, value or class is unknown, of the wrong type, not allowed, or contradicts another.
    """
    imports, argv = split_imports(argv)
    command, words = split_command(argv)
    pairs = split_flags(words, COMMAND_FLAGS[command])
    files: list[tuple[Path, Any]] = []
    for flag, values in pairs:
        if flag in CONFIG_FLAGS:
            path = find_config(values[0])
            files.append((path, read_config_file(path)))
    earlier = _earlier_config(command, pairs)
    user = _names_class(pairs, [content for _, content in [*earlier, *files]])
    if user and (engine != "lightning" or command == "compare"):
        who = "compare" if command == "compare" else f"The engine {engine}"
        raise InputError(f"{who} trains this project's networks only: use lit-mnist or train.py.")
    if not user:
        # Their import may register networks and data sets.
        import_packages(imports)
    merge = Merge(command, engine, imports, user=user)
    for path, content in [*(earlier if user else ()), *files]:
        merge.add_file(path, content)
    merge.end_files()
    for flag, values in pairs:
        merge.add_flag(flag, values)
    merge.check()
    return Request(
        command, merge.settings, tuple(merge.given), merge.classes, merge.flags, tuple(merge.images), imports
    )


def _names_class(pairs: list[tuple[str, list[str]]], files: list[Any]) -> bool:
    """Returns whether the value of `model`, of a flag or a file, is a class."""
    named = [content["model"] for content in files if isinstance(content, dict) and "model" in content]
    named += [parse_text(values[0]) for flag, values in pairs if flag == "--model" and values]
    return any(flag == "--model.class_path" for flag, _ in pairs) or any(
        "class_path" in value if isinstance(value, dict) else isinstance(value, str) and _DOTTED.fullmatch(value)
        for value in named
    )


def _earlier_config(command: str, pairs: list[tuple[str, list[str]]]) -> list[tuple[Path, Any]]:
    """Returns the configuration of the run of the user's classes that is resumed or evaluated."""
    flag = "--ckpt" if command in EVALUATING else "--resume"
    given = [values[0] for name, values in pairs if name in {flag, CKPT_PATH, "--run.resume"} and values]
    folders = [Path(given[-1])] if given else []
    if given == ["auto"]:
        folders = [Path(values[0]) for name, values in pairs if name in {"--run-dir", "--run.dir"} and values]
    for folder in folders:
        for place in (folder, folder.parent, folder.parent.parent):
            # The project's own runs resume from their checkpoint alone. A path may be too long.
            with suppress(InputError, OSError):
                if (path := place / "config.yaml").is_file():
                    return [(path, read_config_file(path))]
    return []
