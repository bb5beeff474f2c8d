"""LightningCLI in subclass mode as the parser of the user's classes and of Lightning's own options."""

from __future__ import annotations

import sys
from typing import Any

from jsonargparse import set_parsing_settings
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.callbacks.batch_size_finder import BatchSizeFinder
from lightning.pytorch.cli import LightningCLI

from lit_mnist.cli.lightning_cli import OptionsParser, as_list
from lit_mnist.cli.own_given import find_named, layers_of, named, plain
from lit_mnist.cli.own_request import OwnRequest
from lit_mnist.errors import InputError
from lit_mnist.plugins.exact_checkpoint import ExactCheckpoint
from lit_mnist.trainer import LitTrainer

# Callbacks that would break a promise.
_REJECTED = (
    (ExactCheckpoint, "the run has one already: use --save-every and --keep"),
    (LearningRateFinder, "config.yaml states the learning rate of a run, but it replaces that: remove it"),
    (BatchSizeFinder, "config.yaml states the batch size of a run, but it replaces that: remove it"),
)


class OwnModuleCLI(OptionsParser):
    """Parses a request, and instantiates its classes on each rank.

    Args:
        request: The request, whose packages are imported.

    Raises:
        InputError: A class is not a module of Lightning or does not have these arguments, or a name is not allowed.
    """

    def __init__(self, request: OwnRequest) -> None:
        self.request, self.allowed = request, request.allowed
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
            for value in named(self.config.get(key), layers_of(request, key)):
                self._check_home(key, value)
        for spec in as_list(self.config.trainer.get("callbacks") if "callbacks" in self._options else None):
            self._check_callback(find_named(str(spec.get("class_path"))))

    def plain_classes(self) -> dict[str, Any]:
        """Returns `model` and `data` as plain values, as a configuration file states them."""
        return {name: self._plain(name) for name in ("model", "data") if self.config.get(name)}

    def plain_options(self) -> dict[str, Any]:
        """Returns the given options of the Trainer that are objects as plain values."""
        return {name: self._plain(f"trainer.{name}") for name in self._options}

    def _plain(self, key: str) -> Any:
        return plain(self.config[key], layers_of(self.request, key))

    def make(self, names: tuple[str, ...]) -> tuple[LightningModule, LightningDataModule | None, dict[str, Any]]:
        """Instantiates the module, its data, and options of the Trainer."""
        made = self.parser.instantiate_classes(self.config)
        return made["model"], made.get("data"), {name: made["trainer"][name] for name in names}

    def _check_callback(self, kind: Any) -> None:
        """Rejects a callback that would break a promise."""
        for rejected, reason in _REJECTED:
            if isinstance(kind, type) and issubclass(kind, rejected):
                raise InputError(f"trainer.callbacks names {kind.__name__}: {reason}.")

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
