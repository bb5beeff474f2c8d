"""From flags and files to an experiment: LightningCLI parses, and every refusal is one message.

The sections `model:` and `data:` have the parameters of `ModelSettings` and `DataSettings`, found behind `**kwargs`;
`trainer:` those of Lightning's Trainer, of which the project takes the part that keeps its promises; `run:` is its own.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, Namespace, set_parsing_settings
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lit_mnist.cli.complaints import plain
from lit_mnist.cli.config_file import ROOMS, names_file, read_config_file
from lit_mnist.cli.flags import SHORT_FLAGS
from lit_mnist.data.dataset import class_names
from lit_mnist.datamodule import MNISTDataModule
from lit_mnist.errors import InputError
from lit_mnist.experiment import DataSettings, Experiment, ModelSettings, RunSettings, TrainerSettings, flatten
from lit_mnist.experiment.task import check_task
from lit_mnist.module import LitClassifier
from lit_mnist.trainer import LitTrainer

_EXTRAS = ("callbacks", "detect_anomaly", "benchmark")
_CONFIG_FLAGS = ("--config", "-c")
_TAKE_FILES = ("--model", "--data", "--trainer", "--run")
_INSTEAD = {
    "default_root_dir": "use --run-dir",
    "timeout": "use --run.timeout",
    "logger": "metrics.csv and TensorBoard files are always written",
    "plugins": "precision and batch norm are plugins already",
    "fast_dev_run": "use --max-steps 1",
    "limit_train_batches": "use --data.train_size or --max-steps",
    "limit_test_batches": "use --data.test_size",
    "limit_val_batches": "use --data.val_size",
    "overfit_batches": "use --data.train_size",
    "enable_checkpointing": "the last and the best epoch are always kept",
    "num_sanity_val_steps": "the data are verified before the ranks start",
    "use_distributed_sampler": "the order of the samples is a function of the seed and the step",
    "reload_dataloaders_every_n_epochs": "each epoch has an order of its own already",
}


class ExperimentCLI(LightningCLI):
    """LightningCLI as a parser: it makes the experiment, and the ranks make the objects.

    Args:
        arguments: Long flags.
        base: Settings that take the place of the defaults, as dotted keys.
    """

    def __init__(self, arguments: list[str], base: Mapping[str, Any]) -> None:
        self._base = dict(base)
        # What a configuration names is checked before anything is imported.
        set_parsing_settings(
            import_path_denylist=["*"], import_path_allowlist=list(ROOMS), instantiate_subclass_spec_in_any=False
        )
        logging.getLogger("lightning.fabric.utilities.seed").setLevel(logging.WARNING)
        super().__init__(
            LitClassifier,
            MNISTDataModule,
            trainer_class=LitTrainer,
            trainer_defaults=asdict(TrainerSettings()),
            save_config_callback=None,
            seed_everything_default=Experiment().seed_everything,
            parser_kwargs={
                "exit_on_error": False,
                # A flag that is nearly right is refused, not guessed at.
                "allow_abbrev": False,
                "prog": "train.py [fit|validate|test|predict|compare]",
                "description": _help(),
            },
            args=arguments,
            run=False,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the `run` section, and links what follows from elsewhere."""
        parser.add_class_arguments(RunSettings, "run")
        parser.link_arguments("seed_everything", "model.seed")
        parser.link_arguments("seed_everything", "data.seed")
        parser.link_arguments(
            ("data.name", "data.emnist_split", "data.border"),
            "model.num_classes",
            lambda name, split, border: len(class_names(name, split, border)),
        )
        parser.set_defaults(self._base)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parses, and turns every complaint into one message."""
        try:
            self.config = parser.parse_args(args)
        except ArgumentError as error:
            raise InputError(plain(str(error), list(parser.get_defaults().keys()), _files(args))) from error
        except (ValueError, OSError, RecursionError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"The settings cannot be read: {' '.join(str(error).split())[:300]}.") from error
        # Before LightningCLI draws a seed for `true`, or passes a number on that numpy does not take.
        seed = self.config.seed_everything
        if isinstance(seed, bool) or not 0 <= seed < 2**32:
            raise InputError(f"seed_everything must be an integer from 0 to 4294967295, but is {seed}.")

    def instantiate_classes(self) -> None:
        """Makes nothing here: the ranks do."""


@dataclass(frozen=True)
class TrainerExtras:
    """Further options of Lightning's Trainer, such as callbacks: named here, made in each rank.

    Attributes:
        names: The options.
        arguments: The flags that set them.
        values: What a configuration file says of them, as plain values.
    """

    names: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def make(self) -> dict[str, Any]:
        """Makes the options' objects."""
        if not self.names:
            return {}
        cli = ExperimentCLI(list(self.arguments), {})
        made = cli.parser.instantiate_classes(cli.config)
        return {name: made["trainer"][name] for name in self.names}


@dataclass(frozen=True)
class Configuration:
    """What the command line and its files say.

    Attributes:
        experiment: The experiment.
        extras: The further options of Lightning's Trainer.
    """

    experiment: Experiment
    extras: TrainerExtras


def configure(arguments: list[str], base: Mapping[str, Any] | None = None) -> Configuration:
    """Parses and checks a configuration.

    Args:
        arguments: Long flags, `--config FILE` among them.
        base: An experiment as nested plain values, to take the place of the defaults.

    Raises:
        InputError: Something is unknown, of the wrong type, out of range or not allowed.
    """
    linked = _linked(arguments)
    cli = ExperimentCLI(arguments, dict(flatten(base or {})))
    config = cli.config
    if linked:
        raise InputError(linked)
    experiment = Experiment(
        seed_everything=config.seed_everything,
        model=_section(ModelSettings, "model", config),
        data=_section(DataSettings, "data", config),
        trainer=_section(TrainerSettings, "trainer", config),
        run=_section(RunSettings, "run", config),
    )
    check_task(experiment)
    names = _check_further_options(cli)
    stated = {name: _plain(config.trainer[name]) for name in names}
    return Configuration(experiment, TrainerExtras(names, tuple(arguments), stated))


def setting_of(arguments: list[str], key: str, default: Any) -> Any:
    """Returns one setting of a command line and its files, or a default of the caller's where they leave it out.

    Args:
        arguments: As of `configure`.
        key: The setting's dotted key.
        default: What takes the place of its default.

    Raises:
        InputError: As of `configure`.
    """
    _linked(arguments)
    return ExperimentCLI(arguments, {key: default}).config[key]


def _section(kind: type[Any], name: str, config: Namespace) -> Any:
    section = config.get(name)
    if not isinstance(section, Namespace) or any(field.name not in section for field in fields(kind)):
        raise InputError(f"{name} must be a section of settings, but is {section}.")
    values = {field.name: config[name][field.name] for field in fields(kind)}
    for field in fields(kind):
        value = values[field.name]
        if value is None and "None" not in str(field.type):
            raise InputError(f"{name}.{field.name} has no value: give one, or leave it out.")
        if field.type == "bool" and not isinstance(value, bool):
            raise InputError(f"{name}.{field.name} must be true or false, but is {value!r}.")
    return kind(**values)


def _check_further_options(cli: ExperimentCLI) -> tuple[str, ...]:
    """Returns the further Trainer options that are used, and refuses those that would break a promise."""
    known = {field.name for field in dataclasses.fields(TrainerSettings)}
    defaults = cli.parser.get_defaults().trainer
    used = [name for name, value in vars(cli.config.trainer).items() if name not in known and value != defaults[name]]
    for name in used:
        if name not in _EXTRAS:
            instead = _INSTEAD.get(name, "leave it out")
            raise InputError(f"trainer.{name} is not offered here, since it would change what is promised: {instead}.")
        _check_callables(f"trainer.{name}", cli.config.trainer[name])
    return tuple(used)


def _check_callables(key: str, value: Any) -> None:
    """Refuses functions and other callables of elsewhere: the parser knows not of all where they come from."""
    if isinstance(value, Namespace):
        value = vars(value)
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        _check_callables(key, part)
    home = str(getattr(value, "__module__", None))
    if callable(value) and not any(f"{home}.".startswith(f"{room}.") for room in ROOMS):
        raise InputError(f"{key} names {value}: a callable may be one of {', '.join(ROOMS)} only.")


def _plain(value: Any) -> Any:
    """Returns what the parser has made of a value of a configuration file as such a value."""
    if isinstance(value, Namespace):
        value = vars(value)
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, Enum):
        return value.value
    if callable(value):
        return f"{value.__module__}.{value.__qualname__}"
    return value if isinstance(value, bool | int | float | None) else str(value)


def _linked(arguments: list[str]) -> str | None:
    """Looks into the files that a command line names before they are parsed.

    Returns:
        What to say of a key of a file that follows from others, which the parser would replace without a word.
    """
    settings = {key for key, _ in flatten(Experiment().to_dict())}
    linked = None
    for name, _, value in (argument.partition("=") for argument in arguments):
        if name in _CONFIG_FLAGS:
            path = Path(value).expanduser()
            content = read_config_file(path, settings)
            for section, key in (("model", "seed"), ("data", "seed"), ("model", "num_classes")):
                if isinstance(content, dict) and isinstance(part := content.get(section), dict) and key in part:
                    source = "seed_everything" if key == "seed" else "data.name"
                    linked = linked or f"{section}.{key} in {path} follows from {source}: leave it out."
        # The parser takes the path of a file for a section, or for a class.
        elif name.startswith(_TAKE_FILES) and name[2:] not in settings and names_file(Path(), value):
            read_config_file(Path(value), settings)
    return linked


def _files(arguments: list[str]) -> str:
    """Returns the configuration files that a command line names."""
    parts = [argument.partition("=") for argument in arguments]
    return ", ".join(value for name, _, value in parts if name in _CONFIG_FLAGS)


def _help() -> str:
    flags = ", ".join(f"{short} = {long}" for short, long in SHORT_FLAGS.items())
    return (
        "Trains, and then tests the best weights on the whole test set. "
        f"Commands: fit, validate, test, predict, compare. Short flags: {flags}. "
        "For validate, test and predict: --ckpt RUN_DIR_OR_CKPT; for predict: --images PATH ...; "
        "for compare: --engines all|NAME,NAME,... --repeats N --timed-steps N --features true|false."
    )
