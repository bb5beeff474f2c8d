"""The command: LightningCLI with short options, the subcommand `train`, and ranks that are forked after the parsing.

LightningCLI parses what a Trainer runs. This file adds, before the parsing, the short options, which are rewritten to
long ones, and, after it, the ranks: they share what is imported and parsed, and each instantiates its own classes.
"""

import atexit
import gc
import inspect
import json
import os
import sys
import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
import yaml
from jsonargparse import Namespace
from jsonargparse.typing import NonNegativeInt
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_mnist import launch, new
from lit_mnist.errors import InputError
from lit_mnist.plugins import PredictionWriter
from lit_mnist.plugins.checkpoint_io import read_checkpoint
from lit_mnist.run import RunRecorder, lock_run_dir, new_run_dir
from lit_mnist.trainer import LitTrainer

SHORT_OPTIONS = {
    "--devices": "--trainer.devices",
    "--epochs": "--trainer.max_epochs",
    "--max-steps": "--trainer.max_steps",
    "--batch-size": "--data.batch_size",
    "--lr": "--model.lr",
    "--seed": "--seed_everything",
    "--precision": "--trainer.precision",
    "--run-dir": "--trainer.default_root_dir",
    "--max-restarts": "--max_restarts",
}
_EPILOG = (
    "Without a subcommand, the command is `train`. Further commands: `new FOLDER` and `compare`. Short options, before "
    f"or behind the subcommand: {', '.join(f'{short} ({long})' for short, long in SHORT_OPTIONS.items())}, --resume "
    "and --ckpt (a run folder or a checkpoint). All options: `train --help`."
)
# They name a run folder or a checkpoint; the option reads the configuration of the run as well.
_RUN_OPTIONS = {"--resume": "last.ckpt", "--ckpt": "best.ckpt"}
_CONFIG = "config.yaml"
_TRAINS = ("fit", "train")


class LitCLI(LightningCLI):
    """LightningCLI for LitTrainer. Any module and data module can take the place of the defaults.

    Args:
        words: The words of the command, after `expand_words`.
    """

    def __init__(self, words: list[str]) -> None:
        self.recorder: RunRecorder | None = None
        super().__init__(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            trainer_class=LitTrainer,
            save_config_callback=SaveRunConfig,
            save_config_kwargs={"save_to_log_dir": False},
            seed_everything_default=42,
            parser_kwargs={"epilog": _EPILOG},
            args=words,
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Returns LightningCLI's subcommands, and `train`."""
        return {**LightningCLI.subcommands(), "train": {"model", "datamodule"}}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the restarts."""
        help_text = "How often to restart the ranks after one has failed."
        parser.add_argument("--max_restarts", type=NonNegativeInt, default=0, help=help_text)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parses the command, and verifies a checkpoint before anything else reads it."""
        argv, sys.argv = sys.argv, sys.argv[:1]  # LightningCLI warns about words in both places
        super().parse_arguments(parser, args)
        sys.argv = argv
        options = self.config[self.config.subcommand]
        if options.ckpt_path and Path(options.ckpt_path).is_file():
            read_checkpoint(options.ckpt_path)
        if options.ckpt_path and options.ckpt_path not in ("last", "best") and not Path(options.ckpt_path).exists():
            raise InputError(f"ckpt_path: {options.ckpt_path} does not exist.")

    @property
    def options(self) -> Namespace:
        """The options of the subcommand."""
        assert self.subcommand
        return self.config[self.subcommand]

    def before_instantiate_classes(self) -> None:
        """Names the run folder, runs the subcommand in each rank, and ends: this process instantiates nothing."""
        trainer = self.options.trainer
        ranks = launch.plan_ranks(trainer.accelerator, trainer.devices, trainer.num_nodes)
        if ranks.are_started:
            launch.join_group(ranks.device_type, trainer.timeout)
        trainer.default_root_dir = self._run_dir()
        folder = Path(trainer.default_root_dir)
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        with lock_run_dir(folder) if is_first else nullcontext():
            if is_first:
                self._keep_metrics()
            warnings.filterwarnings("ignore", "Experiment logs directory .* exists and is not empty")
            launch.launch(
                self.run_rank,
                (),
                ranks,
                timeout=trainer.timeout,
                max_restarts=self.options.max_restarts,
                on_restart=self._resume_last,
            )
        sys.exit(0)

    def run_rank(self) -> None:
        """Instantiates the classes and runs the subcommand."""
        self.instantiate_classes()
        self.run_subcommand()

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Adds the callback that writes the result."""
        assert self.subcommand
        config = json.loads(self.parser.dump(self.config, format="json", skip_unset=False))[self.subcommand]
        self.recorder = RunRecorder(config)
        callbacks = self.config_init[self.subcommand].trainer.callbacks or []
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        if self.subcommand == "predict":
            callbacks = [*callbacks, PredictionWriter()]
        try:
            return super().instantiate_trainer(callbacks=[*callbacks, self.recorder], **kwargs)
        except (ValueError, TypeError, MisconfigurationException) as error:
            raise InputError(f"trainer: {error}") from error

    def run_subcommand(self) -> None:
        """Runs the subcommand, and writes the result."""
        assert self.subcommand
        assert self.recorder
        function = getattr(self.trainer, self.subcommand)
        names = inspect.signature(function).parameters
        given = {name: value for name, value in self.config_init[self.subcommand].items() if name in names}
        function(**{**given, "model": self.model, "datamodule": self.datamodule})
        self.recorder.write(self.trainer)

    def _run_dir(self) -> str:
        """Returns the run folder, which all ranks agree on.

        Raises:
            InputError: It contains another run.
        """
        options = self.options
        name = options.model.class_path.rsplit(".", 1)[-1]
        if name == "LitClassifier":
            name = options.model.init_args.net
        chosen = [str(options.trainer.default_root_dir or new_run_dir(name))]
        if dist.is_initialized():
            dist.broadcast_object_list(chosen, src=0)
        resumes = self.subcommand in _TRAINS and options.ckpt_path
        if not resumes and (Path(chosen[0]) / _CONFIG).exists():
            raise InputError(
                f"trainer.default_root_dir: {chosen[0]} contains a run. Resume it with --resume {chosen[0]}, or choose "
                "another --run-dir."
            )
        return chosen[0]

    def _keep_metrics(self) -> None:
        """Renames the metrics of a run that is resumed: a CSVLogger deletes this file."""
        folder = Path(self.options.trainer.default_root_dir)
        if (metrics := folder / "metrics.csv").exists():
            metrics.rename(folder / f"metrics-{len(list(folder.glob('metrics*.csv')))}.csv")

    def _resume_last(self) -> tuple[()]:
        self._keep_metrics()
        last = Path(self.options.trainer.default_root_dir) / "checkpoints" / "last.ckpt"
        if last.exists():
            self.options.ckpt_path = str(last)
        return ()


class SaveRunConfig(SaveConfigCallback):
    """Saves `config.yaml` without what belongs to one run or subcommand, so that others can read it by `--config`."""

    def __init__(self, parser: LightningArgumentParser, config: Namespace, **kwargs: Any) -> None:
        config = config.clone()
        config.trainer.default_root_dir = config.ckpt_path = None
        for name in ("max_restarts", "weights_only", "verbose", "return_predictions"):
            config.pop(name, None)
        super().__init__(parser, config, **kwargs)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Saves it at once, except before a fit, which the loaders may still reject."""
        if stage != "fit":
            super().setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves it before the first step."""
        super().setup(trainer, pl_module, "fit")

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Replaces the file in one step: a run that is killed meanwhile can still be resumed."""
        folder = Path(trainer.default_root_dir)
        self.parser.save(self.config, folder / f".{_CONFIG}", skip_unset=False, overwrite=True, multifile=False)
        (folder / f".{_CONFIG}").replace(folder / _CONFIG)


def expand_words(words: list[str]) -> list[str]:
    """Returns the words of a command with long options behind the subcommand, as LightningCLI reads them.

    `train` is the subcommand if none is given. A configuration before the subcommand has the same effect as behind it;
    of one with a section for each subcommand, that of this subcommand is used.
    """
    # A word behind an option is its value.
    places = [
        index
        for index, (before, word) in enumerate(zip(["", *words], words, strict=False))
        if word in LitCLI.subcommands() and (not before.startswith("--") or "=" in before or before == "--print_config")
    ]
    if not places and {"-h", "--help"} & {*words}:
        return ["--help"]
    subcommand = words[places[0]] if places else "train"
    queue = [word for index, word in enumerate(words) if index not in places[:1]]
    # Not defaults of the parser: those of a class would take the place of the defaults of the user's class.
    classes = ("--model", "lit_mnist.module.LitClassifier", "--data", "lit_mnist.datamodule.MNISTDataModule")
    expanded = [subcommand, *classes]
    while queue:
        option, equals, value = queue.pop(0).partition("=")
        takes_path = option in _RUN_OPTIONS or option in ("--config", "-c")
        if takes_path and not equals:
            if not queue:
                raise InputError(f"{option} needs a value.")
            value = queue.pop(0)
        if option in _RUN_OPTIONS:
            expanded[1 + len(classes) : 1 + len(classes)] = _read_run(option, value)
        elif takes_path:
            expanded += ["--config", _section(value, subcommand)]
        elif option == "--model.help" and not equals:
            expanded.append("--model.help=lit_mnist.module.LitClassifier")
        else:
            expanded.append(SHORT_OPTIONS.get(option, option) + equals + value)
    return expanded


def _section(config: str, subcommand: str) -> str:
    """Returns the section of a configuration, a file or YAML, for a subcommand; without sections, all of it."""
    try:
        content = yaml.safe_load(Path(config).read_text() if Path(config).is_file() else config)
    except (OSError, ValueError, yaml.YAMLError):
        return config  # the parser has a message for it
    if isinstance(content, dict) and not content.keys().isdisjoint(LitCLI.subcommands()):
        return yaml.safe_dump(content.get(subcommand, {}))
    return config


def _read_run(option: str, value: str) -> list[str]:
    """Returns the long options for a run folder or a checkpoint."""
    path = Path(value)
    checkpoint = path
    if path.is_dir():
        names = (_RUN_OPTIONS[option], "last.ckpt")
        found = [path / "checkpoints" / name for name in names if (path / "checkpoints" / name).exists()]
        if not found:
            raise InputError(f"{option}: {path} contains no checkpoints/{names[0]}.")
        checkpoint = found[0]
    elif not path.exists():
        raise InputError(f"{option}: {path} does not exist. Give a run folder or a checkpoint.")
    config = checkpoint.resolve().parent.parent / _CONFIG
    words = ["--config", str(config)] if config.exists() else []
    if option == "--resume" and path.is_dir():
        words += ["--trainer.default_root_dir", str(path)]
    return [*words, "--ckpt_path", str(checkpoint)]


def main(words: Iterable[str] | None = None) -> None:
    """Runs a command; the words are those of the command line by default.

    Raises:
        SystemExit: The command has failed: see `lit_mnist.launch` for the exit codes.
    """
    words = list(sys.argv[1:] if words is None else words)
    sys.argv = [sys.argv[0], *words]
    if words[:1] == ["new"]:
        run_and_exit(lambda: new.main(words[1:]))
    elif words[:1] == ["compare"]:
        from lit_mnist import compare

        run_and_exit(lambda: compare.main(words[1:]))
    else:
        run_and_exit(lambda: _train(words))


def _train(words: list[str]) -> None:
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, folder)  # where the user's own modules are
    LitCLI(expand_words(words))


def run_and_exit(command: Any) -> None:
    """Runs a command in this process, and turns its errors into a message and an exit code.

    Raises:
        SystemExit: The command has ended.
    """
    # Collections leave out what was imported: to search it takes a fourteenth of a short run.
    gc.freeze()
    sys.stdout, sys.stderr = UnbreakableStream(sys.stdout), UnbreakableStream(sys.stderr)
    code: Any = 0

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)

    # Python takes a second to free what torch has imported. Registered first, this runs after the exits of loggers.
    atexit.register(leave)
    try:
        command()
    except SystemExit as error:
        code = error.code or 0
    except BaseException as error:
        failure = launch.describe(error)
        print(failure.message, file=sys.stderr)
        code = 3 if failure.code == 1 else failure.code
    sys.exit(code)


class UnbreakableStream:
    """A stream whose reader may go away: a closed pipe or a full disk ends no training.

    Args:
        stream: The stream; after an error, what is written is lost.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes a text, and returns its length."""
        try:
            self._stream.write(text)
        except (OSError, ValueError):
            self._stream = Path(os.devnull).open("w")  # noqa: SIM115
        return len(text)

    def flush(self) -> None:
        """Flushes the stream."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._stream = Path(os.devnull).open("w")  # noqa: SIM115

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
