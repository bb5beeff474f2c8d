"""Parses a command, flags and configuration files into one request; only the user's packages may import torch.

The options are those of the experiment's dataclasses (`lit_mnist/experiment/schema.py`). A flag overrides a file, a
later file overrides an earlier one, and both override the defaults.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from lit_mnist.cli.config_file import find_config, parse_yaml, read_config_file
from lit_mnist.cli.flags import CKPT_PATH, COMMANDS, EVALUATING, SHORT_FLAGS, TRAINING_ONLY, commands_of, unknown_flag
from lit_mnist.cli.imports import import_packages, split_imports
from lit_mnist.cli.trainer_options import TrainerExtras, is_trainer_option, read_extras
from lit_mnist.errors import InputError, nearest
from lit_mnist.experiment import Experiment
from lit_mnist.experiment.checks import check_experiment
from lit_mnist.experiment.schema import SECTIONS, SEED, convert, make_experiment, options

_LINKED = {"model.seed": SEED, "data.seed": SEED, "model.num_classes": "data.name"}
_DEVICE_LIST = re.compile(r"\d+(,\d+)+,?")


@dataclass(frozen=True)
class Request:
    """What a command line and its configuration files ask for.

    Attributes:
        command: The command, a key of `COMMANDS`.
        settings: The given settings, converted, by dotted keys.
        extras: The further options of Lightning's Trainer.
        own: The values of the flags that only this command has.
        images: The user's images to predict.
        imports: The user's packages, whose classes a configuration may name.
    """

    command: Any
    settings: Mapping[str, Any]
    extras: TrainerExtras = field(default_factory=TrainerExtras)
    own: Mapping[str, str] = field(default_factory=dict)
    images: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()

    @property
    def trains(self) -> bool:
        """Whether the command trains."""
        return self.command not in EVALUATING

    @property
    def checkpoint(self) -> str | None:
        """The run folder or checkpoint to evaluate."""
        return self.own.get("--ckpt")

    @property
    def resume(self) -> str | None:
        """The run folder or checkpoint to resume from; `auto` resumes from `run_dir` if it contains a checkpoint."""
        return self.settings.get("run.resume")

    @property
    def run_dir(self) -> str | None:
        """The run folder."""
        return self.settings.get("run.dir")

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


def parse(argv: list[str], engine: str = "lightning") -> Request:
    """Parses a command line and the configuration files that it names.

    Args:
        argv: The arguments.
        engine: Name of the engine; messages suggest only its options.

    Raises:
        InputError: A command, flag, key or value is unknown, of the wrong type, or contradicts another.
    """
    imports, argv = split_imports(argv)
    command, words = split_command(argv, engine)
    # Their import may register networks and data sets.
    import_packages(imports)
    own_flags = COMMANDS[command][1]
    files: dict[str, Any] = {}
    flags: dict[str, Any] = {}
    given: dict[str, tuple[str, str, Any]] = {}
    own: dict[str, str] = {}
    images: list[str] = []
    extras: list[tuple[str, Any]] = []
    for name, values in split_flags(words, own_flags):
        flag = ("--ckpt" if command in EVALUATING else "--resume") if name == CKPT_PATH else name
        key = SHORT_FLAGS.get(flag, flag.removeprefix("--"))
        if flag == "--images" and flag in own_flags:
            images += values
        elif flag in own_flags:
            own[flag] = values[0]
        elif flag in {"--config", "-c"}:
            content, further = _read_file(_single(flag, values))
            files |= content
            extras += further
        elif is_trainer_option(key):
            extras.append((key, values[0] if values else None))
        elif key in options():
            _check_has_effect(command, flag, key)
            text = _single(flag, values)
            is_list = key == "trainer.devices" and _DEVICE_LIST.fullmatch(text)
            converted = convert({key: [int(part) for part in text.split(",") if part] if is_list else text})
            if key in SHORT_FLAGS.values():
                earlier, other, meaning = given.setdefault(key, (flag, text, converted[key]))
                if converted[key] != meaning:
                    raise InputError(f"{flag} {text} contradicts {earlier} {other}: give one of them.")
            flags |= converted
        elif key in SECTIONS:
            content, further = _read_section(key, parse_yaml(_single(flag, values), flag), f" in {flag}")
            flags |= content
            extras += further
        else:
            raise InputError(unknown_flag(command, flag, engine))
    if files.get("run.resume") is not None:
        raise InputError("run.resume is accepted on the command line only: use --resume RUN_DIR_OR_CKPT.")
    return Request(command, files | flags, read_extras(extras), own, tuple(images), imports)


def split_command(argv: list[str], engine: str = "lightning") -> tuple[str, list[str]]:
    """Returns the command and the other words."""
    if not argv or argv[0].startswith("-"):
        return "train", argv
    if argv[0] == "bench":
        raise InputError("The benchmarks run from a checkout: python -m benchmarks")
    known = [name for name in commands_of(engine) if name != "train"]
    known += ["doctor", "export"] if engine == "lightning" else []
    if argv[0] not in COMMANDS or argv[0] == "train":
        raise InputError(f"Unknown command {argv[0]!r}{nearest(argv[0], known) or ': use ' + ', '.join(known) + '.'}")
    return argv[0], argv[1:]


def split_flags(words: list[str], own_flags: Container[str]) -> list[tuple[str, list[str]]]:
    """Returns each flag with its values: none or one, or several for `--images`."""
    pairs: list[tuple[str, list[str]]] = []
    rest = list(words)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("-"):
            raise InputError(f"{flag!r} is not a flag: a value follows the flag that it belongs to.")
        flag, equals, value = flag.partition("=")
        if flag.endswith("+") and not is_trainer_option(flag.removeprefix("--").removesuffix("+")):
            raise InputError(f"{flag} is not accepted: give the whole value to {flag[:-1]}.")
        values = [value] if equals else []
        while rest and not equals and not _is_flag(rest[0]) and (flag == "--images" or not values):
            values.append(rest.pop(0))
        if "" in values or (not values and (flag in own_flags or flag in SHORT_FLAGS or flag == CKPT_PATH)):
            raise InputError(f"{flag} needs a value.")
        pairs.append((flag, values))
    return pairs


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-\d+(\.\d+)?", word)


def _check_has_effect(command: str, flag: str, key: str) -> None:
    """Rejects a flag for training on a command that does not train; a file may have all settings of an experiment."""
    if command in EVALUATING and key in TRAINING_ONLY:
        if key == "run.resume":
            raise InputError(f"--resume continues a training; {command} takes --ckpt.")
        raise InputError(f"{flag} has no effect, because {command} does not train: leave it out.")


def _single(flag: str, values: list[str]) -> str:
    if not values:
        raise InputError(f"{flag} needs a value.")
    return values[0]


def _read_file(name: str) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    """Returns the converted settings of a configuration file, and the further options of Lightning's Trainer."""
    path = find_config(name)
    content = read_config_file(path)
    if not isinstance(content, dict) or not content:
        raise InputError(f"The configuration {path} has no settings: it must have sections such as model: or data:.")
    settings: dict[str, Any] = {}
    extras: list[tuple[str, Any]] = []
    for section, value in content.items():
        if section == SEED:
            settings |= convert({SEED: value})
        elif section in SECTIONS:
            read, further = _read_section(section, value, f" in {path}")
            settings |= read
            extras += further
        else:
            raise InputError(f"Unknown key {section} in {path}{nearest(str(section), options()) or '.'}")
    return settings, extras


def _read_section(section: str, content: Any, source: str) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    """Returns one section's converted settings, and the further options of Lightning's Trainer."""
    if not isinstance(content, dict):
        raise InputError(
            f"{section} must be a section of settings, but is {'null' if content is None else content}{source}."
        )
    settings = {f"{section}.{name}": value for name, value in content.items()}
    for key in _LINKED.keys() & settings:
        raise InputError(f"{key}{source} follows from {_LINKED[key]}: leave it out.")
    extras = {key: value for key, value in settings.items() if is_trainer_option(key)}
    return convert({key: settings[key] for key in settings if key not in extras}, source), list(extras.items())
