"""Merges the settings of configuration files and flags, and checks each against its type or its policy.

The options of the dataclasses are converted here. What LightningCLI parses, a class of the user or an object of the
Trainer, is checked for what it names, and kept as text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lit_mnist.cli.class_names import CLASSES, SPEC, check_classes, check_no_file, parse_text
from lit_mnist.cli.config_file import parse_yaml
from lit_mnist.cli.flags import CKPT_PATH, COMMAND_FLAGS, EVALUATING, SHORT_FLAGS, TRAINING_ONLY, unknown_flag
from lit_mnist.cli.trainer_options import NOT_FOR_USERS, POLICY, STRATEGIES, is_trainer_option, option_name
from lit_mnist.cli.words import CONFIG_FLAGS
from lit_mnist.errors import InputError, nearest
from lit_mnist.experiment.schema import SECTIONS, SEED, convert, options

_LINKED = {"model.seed": SEED, "data.seed": SEED, "model.num_classes": "data.name"}
_DEVICE_LIST = re.compile(r"\d+(,\d+)+,?")


class Given(NamedTuple):
    """A value that LightningCLI parses: a class of the user, an argument of it, or an option of the Trainer.

    Attributes:
        key: The dotted key, such as `model.hidden` or `trainer.callbacks+`.
        value: The value, parsed.
        text: The value as the text of a flag.
    """

    key: str
    value: Any
    text: str


class Merge:
    """The settings so far: first those of files, then, after `end_files`, those of flags.

    Args:
        command: The command.
        engine: Name of the engine.
        imports: The packages of `--import`.
        user: Whether `model` and `data` are classes of the user, not settings of the experiment.

    Attributes:
        settings: Converted settings by dotted keys.
        given: What LightningCLI parses.
        classes: The `class_path` of `model` and `data`.
        flags: The values of the flags that only this command has.
        images: The user's images to predict.
    """

    def __init__(self, command: str, engine: str, imports: tuple[str, ...], *, user: bool) -> None:
        self._command, self._engine, self._imports, self._user = command, engine, imports, user
        self._specs: dict[str, dict[str, Any]] = {}
        # The first flag of each option that has a short flag, its text, and its value.
        self._first: dict[str, tuple[str, str, Any]] = {}
        self.settings: dict[str, Any] = {}
        self.given: list[Given] = []
        self.classes: dict[str, str] = {}
        self.flags: dict[str, str] = {}
        self.images: list[str] = []

    def add_file(self, path: Path, content: Any) -> None:
        """Adds the content of a configuration file.

        Raises:
            InputError: It has no sections, or a section or setting is rejected.
        """
        if not isinstance(content, dict) or not content:
            raise InputError(f"The configuration {path} has no settings: it must have sections such as model: or data:")
        for section, value in content.items():
            if section == SEED:
                self._set(SEED, value, f" in {path}")
            elif section == "import":
                raise InputError(f"import in {path}: a configuration imports nothing; use --import PACKAGE.")
            elif section not in SECTIONS:
                raise InputError(f"Unknown key {section} in {path}{nearest(str(section), options()) or '.'}")
            elif self._user and section in CLASSES:
                self._merge_class(section, {"class_path": value} if isinstance(value, str) else value, f" in {path}")
            else:
                self._add_section(section, value, f" in {path}")

    def end_files(self) -> None:
        """Ends the files: flags override them.

        Raises:
            InputError: A file names a run to resume.
        """
        if self.settings.get("run.resume") is not None:
            raise InputError("run.resume is accepted on the command line only: use --resume RUN_DIR_OR_CKPT.")
        for name, spec in self._specs.items():
            self.given.append(Given(name, spec, _text(spec)))
            if "class_path" in spec:
                self.classes[name] = str(spec["class_path"])

    def add_flag(self, flag: str, values: list[str]) -> None:
        """Adds a flag.

        Raises:
            InputError: It is unknown, has no effect, contradicts another, or its value is rejected.
        """
        flag = ("--ckpt" if self._command in EVALUATING else "--resume") if flag == CKPT_PATH else flag
        key = SHORT_FLAGS.get(flag, flag.removeprefix("--"))
        if flag in CONFIG_FLAGS:
            return
        if self._user and (flag == "--images" or (flag in SHORT_FLAGS and key.startswith(("model.", "data.")))):
            raise InputError(
                f"{flag} is an option of the project's own experiment, not of {self.classes.get('model', 'a class')}: "
                "give the arguments of your classes as --model.NAME and --data.NAME."
            )
        if flag == "--images" and flag in COMMAND_FLAGS[self._command]:
            self.images += values
            return
        is_class = self._user and key.partition(".")[0] in CLASSES
        known = flag in COMMAND_FLAGS[self._command] or is_class or key in {*options(), *SECTIONS}
        if not known and not is_trainer_option(key):
            raise InputError(unknown_flag(self._command, flag, self._engine, user=self._user))
        if not values:
            raise InputError(f"{flag} needs a value.")
        if flag in COMMAND_FLAGS[self._command]:
            self.flags[flag] = values[0]
        elif is_class:
            self._add_class_flag(key, values[0])
        elif key in SECTIONS:
            self._add_section(key, parse_yaml(values[0], flag), f" in {flag}")
        elif key in options():
            self._add_setting(flag, key, values[0])
        else:
            self._add_option(key, parse_text(values[0]), values[0])

    def check(self) -> None:
        """Checks the classes and functions that the request names, before anything is imported.

        Raises:
            InputError: One is not allowed, or there is no class for the model.
        """
        if self._user and "model" not in self.classes:
            raise InputError("model has no class_path: name the LightningModule, such as my_package.Lit.")
        for key, value, _ in self.given:
            check_classes(key, value, self._imports)

    def _add_section(self, section: str, content: Any, source: str) -> None:
        if not isinstance(content, dict):
            raise InputError(
                f"{section} must be a section of settings, but is {'null' if content is None else content}{source}."
            )
        for name, value in content.items():
            self._set(f"{section}.{name}", value, source)

    def _set(self, key: str, value: Any, source: str = "") -> None:
        """Sets an option of a dataclass or of Lightning's Trainer."""
        if key in _LINKED:
            raise InputError(f"{key}{source} follows from {_LINKED[key]}: remove it.")
        if is_trainer_option(key):
            self._add_option(key, value, _text(value))
        elif self._user and key == "trainer.strategy":
            if value not in STRATEGIES:
                raise InputError(f"{key} must be one of {', '.join(STRATEGIES)}, but is {value}.")
            self.settings[key] = value
        else:
            converted = convert({key: value}, source)
            if self._user and key in NOT_FOR_USERS and converted[key] != options()[key].default:
                raise InputError(f"{key}{source} is not accepted for your module: {NOT_FOR_USERS[key]}.")
            self.settings |= converted

    def _add_setting(self, flag: str, key: str, text: str) -> None:
        """Adds a flag of one setting. A file may have all settings of an experiment, a flag only those of use."""
        if self._command in EVALUATING and key in TRAINING_ONLY:
            if key == "run.resume":
                raise InputError(f"--resume continues a training run; {self._command} takes --ckpt.")
            raise InputError(f"{flag} has no effect, because {self._command} does not train: remove it.")
        is_list = key == "trainer.devices" and _DEVICE_LIST.fullmatch(text)
        self._set(key, [int(part) for part in text.split(",") if part] if is_list else text)
        if key in SHORT_FLAGS.values():
            earlier, other, value = self._first.setdefault(key, (flag, text, self.settings[key]))
            if self.settings[key] != value:
                raise InputError(f"{flag} {text} contradicts {earlier} {other}: give one of them.")

    def _add_option(self, key: str, value: Any, text: str) -> None:
        """Adds a further option of Lightning's Trainer, or a part of one."""
        name = option_name(key)
        policy = POLICY[name]
        if key == f"trainer.{name}" and value in policy.neutral:
            self.given = [each for each in self.given if option_name(each.key) != name]
            return
        if key.removesuffix("+") == f"trainer.{name}":
            check_no_file(key, value)
        check_classes(f"trainer.{name}" if key.endswith("+") else key, value, self._imports)
        if policy.reason and (policy.user or not self._user):
            raise InputError(f"trainer.{name} is not accepted: {policy.reason}.")
        self.given.append(Given(key, value, text))

    def _merge_class(self, name: str, spec: Any, source: str) -> None:
        """Merges a class of a file into an earlier one; another class replaces the arguments of the earlier one."""
        if not isinstance(spec, Mapping):
            raise InputError(f"{name}{source} must be a section of settings, but is {spec}.")
        if unknown := spec.keys() - SPEC:
            raise InputError(
                f"{name}.{min(map(str, unknown))}{source} is an option of the project's own experiment, or an argument "
                f"of the class: put arguments below {name}.init_args."
            )
        arguments = spec.get("init_args") or {}
        if not isinstance(arguments, Mapping):
            raise InputError(f"{name}.init_args{source} must be a section of settings, but is {arguments}.")
        old = self._specs.get(name)
        if not old or spec.get("class_path") not in (None, old.get("class_path")):
            self._specs[name] = dict(spec)
        else:
            self._specs[name] = {**old, **spec, "init_args": {**(old.get("init_args") or {}), **arguments}}

    def _add_class_flag(self, key: str, text: str) -> None:
        """Adds a class of the user, or an argument of it."""
        value = parse_text(text)
        section, _, rest = key.partition(".")
        if rest in {"", "class_path"}:
            named = value.get("class_path") if isinstance(value, dict) else value
            if named == value == self.classes.get(section):
                # LightningCLI would discard the arguments in the files.
                return
            self.classes[section] = str(named or self.classes.get(section))
        self.given.append(Given(key, value, text))


def _text(value: Any) -> str:
    """Returns a value of a file as the text of a flag. In a list, YAML marks the type of each value."""
    return yaml.safe_dump([value], default_flow_style=True, sort_keys=False, width=1 << 20).strip()[1:-1]
