"""The request of a run with the user's own module, and the check of the classes that it names, before any import."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from lit_mnist.cli.flags import EVALUATING
from lit_mnist.cli.imports import FLAG, check_packages
from lit_mnist.cli.trainer_options import ALLOWED
from lit_mnist.errors import InputError

CLASSES = ("model", "data")


@dataclass
class OwnRequest:
    """What a command line and its files ask for, of another module than the project's.

    Attributes:
        command: `train`, `fit`, `validate`, `test` or `predict`.
        imports: The packages of `--import`.
        settings: `seed_everything` and the options of `run` and `trainer` that every engine has, by dotted keys.
        words: The flags of `model`, `data` and `trainer`, for LightningCLI.
        checkpoint: The run folder or checkpoint to evaluate.
        classes: The value of `class_path` of `model` and `data`.
        seen: Everything that names classes, with its key.
    """

    command: Any
    imports: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    checkpoint: str | None = None
    classes: dict[str, str] = field(default_factory=dict)
    seen: list[tuple[str, Any]] = field(default_factory=list)

    @property
    def trains(self) -> bool:
        """Whether the command trains."""
        return self.command not in EVALUATING

    @property
    def resume(self) -> str | None:
        """The run folder or checkpoint to resume from; `auto` resumes from `run_dir` if it contains a checkpoint."""
        return self.settings.get("run.resume")

    @property
    def run_dir(self) -> str | None:
        """The run folder."""
        return self.settings.get("run.dir")

    @property
    def allowed(self) -> tuple[str, ...]:
        """The modules and packages whose classes the request may name."""
        return (*ALLOWED, *self.imports)

    def given(self, name: str) -> set[str]:
        """Returns the names of the given arguments of `model` or `data`."""
        names: set[str] = set()
        for key, value in self.seen:
            if key == name and isinstance(value, Mapping):
                names |= (value.get("init_args") or {}).keys()
            elif key.startswith(f"{name}."):
                names.add(key.removeprefix(f"{name}.").removeprefix("init_args.").partition(".")[0])
        return names


def check_classes(request: OwnRequest) -> None:
    """Rejects a class outside the allowed packages, at any depth, before anything is imported."""
    if "model" not in request.classes:
        raise InputError("model has no class_path: name the LightningModule, such as my_package.Lit.")
    for key, value in request.seen:
        top = isinstance(value, str) and (key in CLASSES or key.endswith("class_path"))
        for path in [value] if top else _class_paths(value):
            _check_class(key, str(path), request)


def _class_paths(value: Any) -> Iterator[Any]:
    """Yields the values of `class_path` in a nested value, at any depth, also in texts."""
    if isinstance(value, str) and "class_path" in value:
        value = parsed(value)
    if isinstance(value, Mapping):
        if "class_path" in value:
            yield value["class_path"]
        value = list(value.values())
    for part in value if isinstance(value, list | tuple) else ():
        yield from _class_paths(part)


def _check_class(key: str, path: str, request: OwnRequest) -> None:
    """Rejects the name of a class outside the allowed packages. A name without a package is of an imported class."""
    if ("." not in path and request.imports) or any(
        f"{path}.".startswith(f"{package}.") for package in request.allowed
    ):
        return
    # A misspelt name of the package that the class is in.
    check_packages(request.imports)
    package = path.partition(".")[0]
    hint = f"add {FLAG} {package}, if you trust it" if package.isidentifier() else "give its dotted name"
    own = f" of {', '.join(request.imports)}" if request.imports else ""
    raise InputError(f"{key} names {path}, but a configuration may name classes{own or ' of no package'} only: {hint}.")


def parsed(value: Any) -> Any:
    """Returns the value of a text in YAML; another value, or a text that is no YAML, is returned as it is."""
    if not isinstance(value, str):
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return value
