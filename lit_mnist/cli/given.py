"""What a request gives for classes and objects, in contrast to the defaults of the classes, which need no check."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

from jsonargparse import Namespace

from lit_mnist.cli.class_names import SPEC
from lit_mnist.cli.merge import Given

_MISSING = inspect.Parameter.empty


def layers_of(given: Iterable[Given], key: str) -> list[Any]:
    """Returns the given values of an option, of files and flags, with the classes and arguments where they belong.

    For example, the flag `--model.part.size 3` is `{"init_args": {"part": {"init_args": {"size": 3}}}}`.
    """
    layers = []
    for name, value, _ in given:
        if name.removesuffix("+") == key:
            layers.append(value)
        elif name.startswith(f"{key}."):
            layer, parts = value, [part for part in name.removeprefix(f"{key}.").split(".") if part != "init_args"]
            for part in reversed(parts):
                layer = {part: layer} if part in SPEC else {"init_args": {part: layer}}
            layers.append(layer)
    return layers


def named(value: Any, layers: Sequence[Any]) -> Iterator[Any]:
    """Yields the class paths and the callables in a parsed value that were given.

    Args:
        value: The parsed value.
        layers: See `layers_of`.
    """
    if (given := _arguments(value, layers)) is not None:
        yield value.class_path
        for name, part in _init_args(value).items():
            if name in given:
                yield from named(part, given[name])
        yield from _all_named(vars(value).get("dict_kwargs"))
    else:
        yield from _all_named(value)


def plain(value: Any, layers: Sequence[Any]) -> Any:
    """Returns a parsed value as a plain value of a configuration file.

    A default that such a file cannot state exactly, such as a function or a tuple, is not stated.
    """
    given = _arguments(value, layers)
    if given is None:
        return plain_value(value)
    spec = {name: plain_value(part) for name, part in vars(value).items() if name != "init_args"}
    kind = find_named(value.class_path)
    arguments: dict[str, Any] = {}
    for name, part in _init_args(value).items():
        if name in given:
            arguments[name] = plain(part, given[name])
        elif _is_plain(default := _default(kind, name)) and default == part:
            arguments[name] = plain_value(part)
    return {**spec, "init_args": arguments} if "init_args" in vars(value) else spec


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


def find_named(path: str) -> Any:
    """Returns the class or function of a dotted name in the imported modules, or None."""
    module, _, rest = path.rpartition(".")
    names = [rest]
    while module and module not in sys.modules:
        module, _, rest = module.rpartition(".")
        names.insert(0, rest)
    found: Any = sys.modules.get(module)
    for name in names:
        found = getattr(found, name, None)
    return found


def arguments_of(kind: Any) -> dict[str, Any]:
    """Returns the arguments of a class, including those of its base classes, or of a function, with their defaults."""
    found: dict[str, Any] = {}
    for each in reversed(kind.__mro__) if isinstance(kind, type) else (kind,):
        own = vars(each).get("__init__") if isinstance(kind, type) else each
        if callable(own) and own is not object.__init__:
            for name, parameter in inspect.signature(own).parameters.items():
                if name != "self" and parameter.kind not in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
                    found[name] = parameter.default
    return found


def _arguments(value: Any, layers: Sequence[Any]) -> dict[str, list[Any]] | None:
    """Returns the given values of each given argument of a class; None if the value is none, or was given otherwise."""
    if not isinstance(value, Namespace) or not isinstance(vars(value).get("class_path"), str):
        return None
    found: dict[str, list[Any]] = {}
    for layer in layers:
        if isinstance(layer, str) and "{" not in layer:
            continue
        arguments = (layer.get("init_args") or {}) if isinstance(layer, Mapping) and layer.keys() <= SPEC else None
        if not isinstance(arguments, Mapping):
            return None
        for name, part in arguments.items():
            found.setdefault(str(name), []).append(part)
    return found


def _init_args(value: Namespace) -> dict[str, Any]:
    arguments = vars(value).get("init_args")
    return dict(vars(arguments)) if isinstance(arguments, Namespace) else dict(arguments or {})


def _all_named(value: Any) -> Iterator[Any]:
    if isinstance(value, Namespace):
        value = vars(value)
    if isinstance(value, dict):
        if isinstance(value.get("class_path"), str):
            yield value["class_path"]
        for part in value.values():
            yield from _all_named(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _all_named(part)
    elif callable(value):
        yield value


def _default(kind: Any, name: str) -> Any:
    try:
        return arguments_of(kind).get(name, _MISSING)
    except (TypeError, ValueError):
        return _MISSING


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(part) for key, part in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return type(value) in {bool, int, float, str, type(None)}
