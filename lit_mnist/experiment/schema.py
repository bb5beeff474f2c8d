"""The options of an experiment, read from its dataclasses, and the conversion of values to their types."""

from __future__ import annotations

import inspect
import json
import math
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from lit_mnist.checkpoint.config import flatten
from lit_mnist.errors import InputError, nearest
from lit_mnist.experiment.experiment import Experiment
from lit_mnist.experiment.registry import REGISTERED, explain_unknown

SEED = "seed_everything"
SECTIONS = ("model", "data", "trainer", "run")
_LONGEST_VALUE = 3_000
_FLOAT = r"[+-]?(\d+(\.\d*)?[eE][+-]?\d+|nan|inf)"
# Settings of earlier releases, which a configuration or a checkpoint may state with these values, without effect.
_REMOVED = {
    "model.checkpoint_activations": False,
    "data.download": False,
    "data.image_size": 256,
    "data.border": "ignore",
}
# Other spellings that Lightning's Trainer accepts.
ALIASES: dict[str, dict[str, str]] = {
    "trainer.precision": {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"},
    "trainer.devices": {"-1": "auto"},
    "trainer.accelerator": {"cuda": "gpu"},
}


@dataclass(frozen=True)
class Option:
    """An option of an experiment.

    Attributes:
        key: Its dotted key, such as `model.lr`.
        kinds: The members of its type, such as `(int, NoneType)`.
        default: Its default.
        help: Its description, in one line.
    """

    key: str
    kinds: tuple[Any, ...]
    default: Any
    help: str

    @property
    def wanted(self) -> str:
        """The accepted values, in words."""
        words = [_describe(kind) for kind in self.kinds if kind is not types.NoneType]
        return " or ".join([*words, *(["null"] if types.NoneType in self.kinds else [])])

    def convert(self, value: Any) -> Any:
        """Converts a value of a file, or the text of a flag, to the option's type.

        Raises:
            InputError: The value is of another type, NaN, or not one of the choices.
        """
        if isinstance(value, str) and len(value) > _LONGEST_VALUE:
            raise InputError(f"{self.key} has a text of {len(value)} characters.")
        if types.NoneType in self.kinds and value in {"null", "~"}:
            return None
        if isinstance(value, str | int):
            value = ALIASES.get(self.key, {}).get(str(value), value)
        for candidate in (value, _parsed(value)):
            for kind in self.kinds:
                found, converted = _matches(kind, candidate)
                if found and isinstance(converted, float) and math.isnan(converted):
                    raise InputError(f"{self.key} must be a finite number, but is nan.")
                if found:
                    return converted
        given = "null" if value is None else " ".join(str(value).split())[:100]
        advice = explain_unknown(self.key, given, get_args(self.kinds[0])) if isinstance(value, str) else "."
        raise InputError(f"{self.key} must be {self.wanted}, but is {given}{advice}")


def options() -> dict[str, Option]:
    """Returns all options by dotted key, in the order of a configuration file, with the registered names."""
    return _options(tuple((key, tuple(known)) for key, known in REGISTERED.items()))


def builtin_options() -> dict[str, Option]:
    """Returns all options by dotted key, without the registered names."""
    return _options(())


@cache
def _options(registered: tuple[tuple[str, tuple[str, ...]], ...]) -> dict[str, Option]:
    default = dict(flatten(Experiment().to_dict()))
    found = {
        SEED: Option(SEED, (int,), default[SEED], "Seed of the weights, the split, the order and the augmentation.")
    }
    for section in SECTIONS:
        kind = type(getattr(Experiment(), section))
        hints, texts = get_type_hints(kind), _docstring_arguments(kind)
        for field in fields(kind):
            key = f"{section}.{field.name}"
            found[key] = Option(key, _kinds(hints[field.name]), default[key], texts[field.name])
    for key, names in registered:
        choices: Any = Literal[(*get_args(found[key].kinds[0]), *names)]
        found[key] = replace(found[key], kinds=(choices,))
    return found


def convert(values: Mapping[str, Any], source: str = "") -> dict[str, Any]:
    """Converts each setting to the type of its option.

    Args:
        values: Plain values by dotted keys.
        source: Where they come from, for messages, such as ` in config.yaml`.

    Raises:
        InputError: A key is unknown, or a value is of another type.
    """
    values = without_removed(values)
    for key in values:
        if key not in options():
            raise InputError(f"Unknown key {key}{source}{nearest(key, options()) or '.'}")
    return {key: options()[key].convert(value) for key, value in values.items()}


def without_removed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings by dotted keys without those of earlier releases that had their default."""
    return {key: value for key, value in values.items() if key not in _REMOVED or value != _REMOVED[key]}


def make_experiment(values: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> Experiment:
    """Makes an experiment from converted settings.

    Args:
        values: Settings by dotted keys.
        base: Nested settings that replace the defaults.

    Raises:
        InputError: A value is out of range.
    """
    merged = {key: option.default for key, option in options().items()}
    merged |= convert(dict(flatten(base or {})))
    merged |= values
    sections: dict[str, Any] = {
        section: type(getattr(Experiment(), section))(
            **{key.partition(".")[2]: value for key, value in merged.items() if key.startswith(f"{section}.")}
        )
        for section in SECTIONS
    }
    return Experiment(seed_everything=merged[SEED], **sections)


def as_flags(values: Mapping[str, Any]) -> list[str]:
    """Returns converted settings as flags, which parse to the same values."""
    return [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items()]


def _kinds(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) in {Union, types.UnionType}:
        return tuple(part for member in get_args(hint) for part in _kinds(member))
    return (hint,)


def _parsed(value: Any) -> Any:
    """Parses the text of a flag as YAML, if it has no anchors, which could expand."""
    if not isinstance(value, str) or "&" in value or "*" in value:
        return value
    try:
        return yaml.safe_load(value)
    except (yaml.YAMLError, ValueError, RecursionError):
        return value


def _matches(kind: Any, value: Any) -> tuple[bool, Any]:
    """Returns whether a value matches a type, and the converted value."""
    origin = get_origin(kind)
    if origin is Literal:
        return (value in get_args(kind) and type(value) in {type(choice) for choice in get_args(kind)}), value
    if origin is list:
        member = get_args(kind)[0]
        return (isinstance(value, list) and all(_matches(member, part)[0] for part in value)), value
    if kind is float and isinstance(value, str) and re.fullmatch(_FLOAT, value):
        # YAML 1.1 reads 1e-3 and nan as text.
        return True, float(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return (True, float(value)) if abs(value) < 2**53 else (False, math.nan)
    return type(value) is kind, value


def _describe(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ("one of " if len(get_args(kind)) > 1 else "") + ", ".join(map(str, get_args(kind)))
    if get_origin(kind) is list:
        return "a list of integers"
    return {int: "an integer (int)", float: "a number (float)", bool: "true or false", str: "text"}[kind]


def _docstring_arguments(kind: type[Any]) -> dict[str, str]:
    """Returns the description of each argument in a Google docstring, in one line."""
    body = (inspect.getdoc(kind) or "").partition("Args:\n")[2]
    entries = re.split(r"^    (?=\w+: )", body, flags=re.MULTILINE)[1:]
    pairs = (entry.partition(": ")[::2] for entry in entries)
    return {name: " ".join(text.split()) for name, text in pairs}
