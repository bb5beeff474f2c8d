"""The classes and functions that a configuration may name, checked before anything is imported. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lit_mnist.cli.config_file import parse_yaml
from lit_mnist.errors import InputError
from lit_mnist.run.imports import FLAG, check_packages

# The sections in which a configuration may name a class of the user.
CLASSES = ("model", "data")
# The keys of a class in a configuration.
SPEC = frozenset({"class_path", "init_args", "dict_kwargs"})
# A configuration may name what is defined here, and in the packages of `--import`. Other classes could start processes,
# open ports, or write anywhere.
ALLOWED = (
    "lightning.pytorch.callbacks",
    "lightning.pytorch.loggers",
    "lightning.pytorch.profilers",
    "lit_mnist.callbacks",
    "lit_mnist.datamodule",
    "lit_mnist.module",
    "torch.nn",
    "torch.optim",
)


def check_classes(key: str, value: Any, imports: tuple[str, ...]) -> None:
    """Rejects a class outside the allowed packages at any depth of a value.

    Args:
        key: The dotted key of the value.
        value: The value, parsed.
        imports: The packages of `--import`.

    Raises:
        InputError: A class is not allowed, or a package of `--import` does not exist.
    """
    for path in _class_paths(key, value):
        # A name without a package is that of an imported class, or a short name of Lightning's classes.
        known = "." not in path and (imports or key not in CLASSES)
        if not known and not is_allowed(path, imports):
            # A misspelt name of the package that the class is in.
            check_packages(imports)
            raise InputError(f"{key} names {path}: {explain_allowed((*ALLOWED, *imports), path)}")


def is_allowed(path: str, imports: Iterable[str]) -> bool:
    """Returns whether a dotted name is one of an allowed package."""
    return any(f"{path}.".startswith(f"{package}.") for package in (*ALLOWED, *imports))


def explain_allowed(allowed: Iterable[str], path: str) -> str:
    """Returns the end of a message about a name that is not allowed."""
    package = path.partition(".")[0]
    hint = f" Add {FLAG} {package}, if you trust it."
    if "." not in path or package in {"lightning", "lit_mnist", "torch"}:
        hint = ""
    return f"a configuration may name what is defined in {', '.join(allowed)} only.{hint}"


def check_no_file(key: str, value: Any) -> None:
    """Rejects the name of a file, which LightningCLI would read instead, even from a pipe."""
    for part in value if isinstance(value, list) else [value]:
        try:
            is_file = isinstance(part, str) and "\0" not in part and Path(part).exists()
        except OSError:
            continue
        if is_file:
            raise InputError(f"{key} names the file {part}: give the settings themselves.")


def parse_text(value: Any) -> Any:
    """Returns the value of a text in YAML; another value, or a text that is not YAML, is returned as it is."""
    try:
        return parse_yaml(value, "") if isinstance(value, str) else value
    except InputError:
        return value


def _class_paths(key: str, value: Any) -> Iterator[str]:
    if key in CLASSES or key.endswith(".class_path"):
        yield from [value] if isinstance(value, str) else []
    elif key.startswith("trainer.") and key.count(".") == 1:
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, str) and "." in part and not part.startswith("."):
                yield part
    yield from _specs(value)


def _specs(value: Any) -> Iterator[str]:
    """Yields the values of `class_path` in a nested value, at any depth, including those in texts."""
    if isinstance(value, str) and "class_path" in value:
        value = parse_text(value)
    if isinstance(value, Mapping):
        if "class_path" in value:
            yield str(value["class_path"])
        value = list(value.values())
    for part in value if isinstance(value, list | tuple) else ():
        yield from _specs(part)
