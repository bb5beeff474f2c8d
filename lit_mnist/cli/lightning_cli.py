"""LightningCLI as the parser of the user's classes and of objects of the Trainer, such as callbacks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from jsonargparse import ArgumentError, set_parsing_settings
from lightning.pytorch import LightningDataModule, LightningModule, callbacks, loggers
from lightning.pytorch.cli import LightningCLI

from lit_mnist.cli.class_names import CLASSES, explain_allowed, is_allowed
from lit_mnist.cli.given import find_named, layers_of, named, plain
from lit_mnist.cli.option_checks import as_list, check_callback, check_values
from lit_mnist.cli.plain_errors import explain
from lit_mnist.cli.request import Request
from lit_mnist.datamodule import MNISTDataModule
from lit_mnist.errors import InputError
from lit_mnist.module import LitClassifier
from lit_mnist.run.imports import import_packages
from lit_mnist.trainer import LitTrainer

_KNOWN = {
    "trainer.callbacks": [name for name in callbacks.__all__ if name != "Callback"],
    "trainer.logger": [name for name in loggers.__all__ if name != "Logger"],
}


class ClassParser(LightningCLI):
    """Parses what a request gives for LightningCLI. Each rank makes the objects.

    Args:
        request: The request, whose packages are imported.

    Attributes:
        options_are_known: Whether the options of the Trainer name only classes of Lightning and torch, which this
            process can make without running code of the user.

    Raises:
        InputError: A class does not exist, does not have these arguments, is not allowed, or would break a promise.
    """

    def __init__(self, request: Request) -> None:
        self.request, user = request, bool(request.classes)
        # The names in a configuration are checked before anything is imported.
        set_parsing_settings(
            import_path_denylist=["*"],
            import_path_allowlist=list(request.allowed),
            instantiate_subclass_spec_in_any=False,
        )
        super().__init__(
            LightningModule if user else LitClassifier,
            LightningDataModule if "data" in request.classes else None if user else MNISTDataModule,
            trainer_class=LitTrainer,
            save_config_callback=None,
            seed_everything_default=False,
            parser_kwargs={"exit_on_error": False, "allow_abbrev": False},
            subclass_mode_model=user,
            subclass_mode_data=user,
            args=[f"--{key}={text}" for key, _, text in request.given],
            run=False,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=user,
        )
        self.options_are_known = True
        for key in self._keys():
            for value in named(self.config[key], layers_of(request.given, key)):
                home = self._home(key, value)
                self.options_are_known &= key in CLASSES or is_allowed(home, ())
        options = {name: self.config.trainer[name] for name in request.options}
        for spec in as_list(options.get("callbacks")):
            check_callback(find_named(str(spec.get("class_path"))), user=user)
        check_values(options)

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns how a new process makes this parser: from the request."""
        return _parse_again, (self.request,)

    def parse_arguments(self, parser: Any, args: Any) -> None:
        """Parses the flags; raises an InputError with one message."""
        try:
            self.config = parser.parse_args(args)
        except ArgumentError as error:
            raise InputError(explain(str(error), known=_KNOWN, allowed=self.request.allowed)) from error
        except (ValueError, OSError, RecursionError) as error:
            raise InputError(f"The settings cannot be read: {' '.join(str(error).split())[:300]}.") from error

    def instantiate_classes(self) -> None:
        """Does nothing: the ranks instantiate the objects."""

    def plain_classes(self) -> dict[str, Any]:
        """Returns the user's `model` and `data` as plain values, as a configuration file states them."""
        return {key: self._plain(key) for key in self._keys() if key in CLASSES}

    def plain_options(self) -> dict[str, Any]:
        """Returns the given options of the Trainer as plain values."""
        return {name: self._plain(f"trainer.{name}") for name in self.request.options}

    def make(self) -> tuple[LightningModule, LightningDataModule | None, dict[str, Any]]:
        """Instantiates the module, its data, and the given options of the Trainer."""
        made = self.parser.instantiate_classes(self.config)
        return made["model"], made.get("data"), {name: made["trainer"][name] for name in self.request.options}

    def make_options(self) -> dict[str, Any]:
        """Instantiates the given options of the Trainer alone."""
        config = self.config.clone()
        for key in CLASSES:
            config.pop(key, None)
        made = self.parser.instantiate_classes(config)["trainer"]
        return {name: made[name] for name in self.request.options}

    def _keys(self) -> Iterator[str]:
        yield from self.request.classes
        yield from (f"trainer.{name}" for name in self.request.options)

    def _plain(self, key: str) -> Any:
        return plain(self.config[key], layers_of(self.request.given, key))

    def _home(self, key: str, value: Any) -> str:
        """Returns the module that defines a class; rejects another than the allowed ones, even if they import it."""
        if isinstance(value, str):
            module, _, name = value.rpartition(".")
            home = str(getattr(getattr(sys.modules.get(module), name, None), "__module__", None))
        else:
            home = str(getattr(value, "__module__", None))
            value = f"{home}.{getattr(value, '__qualname__', value)}"
        if not is_allowed(home, self.request.imports):
            allowed = explain_allowed(self.request.allowed, f"{home}.")
            raise InputError(f"{key} names {value}, which is defined in {home}: {allowed}")
        return home


def _parse_again(request: Request) -> ClassParser:
    import_packages(request.imports)
    return ClassParser(request)
