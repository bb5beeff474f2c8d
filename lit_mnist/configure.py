"""From flags and files to an experiment: LightningCLI parses, and every refusal is one message.

The sections `model:` and `data:` have the parameters of `ModelSettings` and `DataSettings`, found behind `**kwargs`;
`trainer:` those of Lightning's Trainer, of which the project takes the part that keeps its promises; `run:` is its own.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, Namespace, set_parsing_settings
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lit_mnist.data.dataset import class_names
from lit_mnist.datamodule import MNISTDataModule
from lit_mnist.errors import InputError
from lit_mnist.experiment import DataSettings, Experiment, ModelSettings, RunSettings, TrainerSettings
from lit_mnist.flags import SHORT_FLAGS, nearest
from lit_mnist.module import LitClassifier
from lit_mnist.trainer import LitTrainer

_PACKAGES = ("lightning", "torch", "lit_mnist")
_EXTRAS = ("callbacks", "detect_anomaly", "benchmark")
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
        set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=list(_PACKAGES))
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
            ("data.name", "data.emnist_split"), "model.num_classes", lambda name, split: len(class_names(name, split))
        )
        parser.set_defaults(self._base)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parses, and turns every complaint into one message."""
        try:
            self.config = parser.parse_args(args)
        except ArgumentError as error:
            raise InputError(_plain(str(error), list(parser.get_defaults().keys()), _files(args))) from error
        except (UnicodeDecodeError, OSError) as error:
            raise InputError(f"The configuration {_files(args)} cannot be read: {error}.") from error
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
    """

    names: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()

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
    cli = ExperimentCLI(arguments, dict(flatten(base or {})))
    config = cli.config
    _refuse_linked(_files(arguments))
    experiment = Experiment(
        seed_everything=config.seed_everything,
        model=_section(ModelSettings, "model", config),
        data=_section(DataSettings, "data", config),
        trainer=_section(TrainerSettings, "trainer", config),
        run=_section(RunSettings, "run", config),
    )
    return Configuration(experiment, TrainerExtras(_check_further_options(cli), tuple(arguments)))


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
    return tuple(used)


def flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Returns nested values as pairs of a dotted key and a value."""
    flat: list[tuple[str, Any]] = []
    for name, value in values.items():
        flat += flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(prefix + name, value)]
    return flat


def read_saved_experiment(values: object, source: Path) -> dict[str, Any]:
    """Returns the experiment that a checkpoint holds, checked through the parser that checks every configuration.

    Args:
        values: Nested plain values.
        source: Where they come from, for the message.

    Raises:
        InputError: They are no experiment of this version.
    """
    if not isinstance(values, Mapping):
        raise InputError(f"{source} holds no experiment.")
    flat = dict(flatten(values))
    known = {key for key, _ in flatten(Experiment().to_dict())}
    unknown = sorted(set(flat) - known)
    if unknown or any("class_path" in str(value) for value in flat.values()):
        raise InputError(f"{source} holds an experiment that this version does not know ({', '.join(unknown)}).")
    arguments = [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in flat.items()]
    try:
        return configure(arguments).experiment.to_dict()
    except InputError as error:
        raise InputError(f"{source} holds an experiment that this version does not take: {error}") from error


def _refuse_linked(files: str) -> None:
    """Refuses keys of a file that follow from others, which the parser would replace without a word."""
    for path in filter(None, files.split(", ")):
        content = yaml.safe_load(Path(path).read_text())
        for section, key in (("model", "seed"), ("data", "seed"), ("model", "num_classes")):
            if isinstance(content.get(section), dict) and key in content[section]:
                source = "seed_everything" if key == "seed" else "data.name"
                raise InputError(f"{section}.{key} in {path} follows from {source}: leave it out.")


def _files(arguments: list[str]) -> str:
    """Returns the configuration files that a command line names."""
    return ", ".join(argument.partition("=")[2] for argument in arguments if argument.startswith(("--config=", "-c=")))


def _plain(message: str, keys: list[str], files: str) -> str:
    """Returns jsonargparse's complaint as one plain sentence or two."""
    if "Unexpected config" in message:
        return f"The configuration {files} holds no settings: it must be sections such as model: or data:."
    if found := re.search(r"unrecognized arguments: (\S+)", message, re.IGNORECASE):
        flag = found[1].partition("=")[0]
        return f"Unknown flag {flag}{nearest(flag, [f'--{key}' for key in keys] + list(SHORT_FLAGS))}"
    if found := re.search(r"Group '(\S+)' does not accept option '(\S+)'", message):
        return f"Unknown key {found[1]}.{found[2]}{nearest(f'{found[1]}.{found[2]}', keys)}"
    if found := re.search(r"Option '(\S+)' is not accepted", message):
        return f"Unknown key {found[1]}{nearest(found[1], keys)}"
    found = re.match(r'Parser key "([^"]+)":\s*', message)
    if not found:
        return " ".join(message.split())
    key, rest = {"model.seed": "seed_everything"}.get(found[1], found[1]), message[found.end() :]
    if denied := re.search(r"Importing '([^']+)' is not allowed", rest):
        return f"{key} names {denied[1]}: a configuration may name classes of {', '.join(_PACKAGES)} only."
    if problem := re.search(r"given class_path '([^']+)':\s*(.+?)(?:\n\s*-|\n\s*Given|$)", rest, re.DOTALL):
        return f"{key}: {problem[1]} cannot be made: {' '.join(problem[2].split())}"
    if given := re.search(r"(?:Got value|Given value): (.*)", rest, re.DOTALL):
        expected = " ".join(re.findall(r"Expected a.*|Subtypes.*", rest))
        kinds = re.findall(r"<class '(\w+)'>|Literal(\[[^\]]*\])", expected)
        names = dict.fromkeys(kind or literal.strip("[]") for kind, literal in kinds)
        wanted = " or ".join({"str": "text"}.get(name, name) for name in names if name != "NoneType")
        if key == "seed_everything":
            wanted = "an integer from 0"
        return f"{key} must be {wanted or 'something else'}, but is {' '.join(given[1].split())[:100]}."
    return f"{key}: {' '.join(rest.split())}"


def _help() -> str:
    flags = ", ".join(f"{short} = {long}" for short, long in SHORT_FLAGS.items())
    return (
        "Trains, and then tests the best weights on the whole test set. "
        f"Commands: fit, validate, test, predict, compare. Short flags: {flags}. "
        "For validate, test and predict: --ckpt RUN_DIR_OR_CKPT; for predict: --images PATH ...; "
        "for compare: --engines all|NAME,NAME,... --repeats N --timed-steps N --features true|false."
    )
