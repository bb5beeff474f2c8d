"""LightningCLI in subclass mode as the parser of the user's classes and of Lightning's own options."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from jsonargparse import Namespace, set_parsing_settings
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.callbacks.batch_size_finder import BatchSizeFinder
from lightning.pytorch.cli import LightningCLI

from lit_mnist.cli.lightning_cli import OptionsParser, plain_value
from lit_mnist.cli.own_request import OwnRequest
from lit_mnist.errors import InputError
from lit_mnist.plugins.exact_checkpoint import ExactCheckpoint
from lit_mnist.trainer import LitTrainer

# Callbacks that would break a promise.
_REJECTED = (
    (ExactCheckpoint, "the run has one already: use --save-every and --keep"),
    (LearningRateFinder, "config.yaml states the learning rate of a run, but it replaces that: leave it out"),
    (BatchSizeFinder, "config.yaml states the batch size of a run, but it replaces that: leave it out"),
)


class OwnModuleCLI(OptionsParser):
    """Parses a request, and instantiates its classes on each rank.

    Args:
        request: The request, whose packages are imported.

    Raises:
        InputError: A class is not a module of Lightning or does not have these arguments, or a name is not allowed.
    """

    def __init__(self, request: OwnRequest) -> None:
        self.request = request
        set_parsing_settings(
            import_path_denylist=["*"],
            import_path_allowlist=list(request.allowed),
            instantiate_subclass_spec_in_any=False,
        )
        LightningCLI.__init__(
            self,
            LightningModule,
            LightningDataModule if "data" in request.classes else None,
            trainer_class=LitTrainer,
            save_config_callback=None,
            seed_everything_default=False,
            parser_kwargs={"exit_on_error": False, "allow_abbrev": False},
            subclass_mode_model=True,
            subclass_mode_data=True,
            args=request.words,
            run=False,
            auto_configure_optimizers=False,
        )
        names = [key.partition(".")[2].partition(".")[0].removesuffix("+") for key, _ in request.seen]
        trainer = [name for (key, _), name in zip(request.seen, names, strict=True) if key.startswith("trainer.")]
        self._options = tuple(dict.fromkeys(trainer))
        for key in ("model", "data", *(f"trainer.{name}" for name in self._options)):
            for value in _named(self.config.get(key)):
                self._check_home(key, value)

    def plain_classes(self) -> dict[str, Any]:
        """Returns `model` and `data` as plain values, as a configuration file states them.

        A default that is a class or a function is left out: where any callable is accepted, LightningCLI would read its
        name as that of a class to instantiate.
        """
        return {name: self._plain_class(name) for name in ("model", "data") if self.config.get(name)}

    def _plain_class(self, name: str) -> dict[str, Any]:
        given = self.request.given(name)
        spec = dict(vars(self.config[name]))
        arguments = spec.get("init_args")
        if arguments is not None:
            kept = {key: value for key, value in vars(arguments).items() if key in given or not callable(value)}
            spec["init_args"] = kept
        plain: dict[str, Any] = plain_value(spec)
        return plain

    def plain_options(self) -> dict[str, Any]:
        """Returns the given options of the Trainer that are objects as plain values."""
        return {name: plain_value(self.config.trainer[name]) for name in self._options}

    def make(self, names: tuple[str, ...]) -> tuple[LightningModule, LightningDataModule | None, dict[str, Any]]:
        """Instantiates the module, its data, and options of the Trainer.

        Raises:
            InputError: A callback would break a promise.
        """
        made = self.parser.instantiate_classes(self.config)
        options = {name: made["trainer"][name] for name in names}
        callbacks = options.get("callbacks") or []
        for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
            for kind, reason in _REJECTED:
                if isinstance(callback, kind):
                    raise InputError(f"trainer.callbacks names {type(callback).__name__}: {reason}.")
        return made["model"], made.get("data"), options

    def _check_home(self, key: str, value: Any) -> None:
        """Rejects what another module defines, also if an allowed one imports it."""
        if isinstance(value, str):
            module, _, name = value.rpartition(".")
            found = getattr(sys.modules.get(module), name, None)
            home = str(getattr(found, "__module__", None))
        else:
            home = str(getattr(value, "__module__", None))
            value = f"{home}.{getattr(value, '__qualname__', value)}"
        if not any(f"{home}.".startswith(f"{package}.") for package in self.request.allowed):
            raise InputError(
                f"{key} names {value}, which is defined in {home}: a configuration may name what is defined in "
                f"{', '.join(self.request.allowed)} only. Add --import {home.partition('.')[0]}, if you trust it."
            )


def _named(value: Any) -> Iterator[Any]:
    """Yields the class paths and the callables in a parsed value."""
    if isinstance(value, Namespace):
        value = vars(value)
    if isinstance(value, dict):
        if isinstance(value.get("class_path"), str):
            yield value["class_path"]
        for part in value.values():
            yield from _named(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _named(part)
    elif callable(value):
        yield value
