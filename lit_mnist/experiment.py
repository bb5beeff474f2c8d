"""The experiment of a hand-written engine: the options of `python train.py`, as plain values.

LightningCLI parses them, and instantiates nothing. The engines share what an experiment consists of: its network, data,
optimizer and number of steps. Each engine has its own loop.
"""

import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc import locate
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
import yaml
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lit_mnist import launch
from lit_mnist.cli import LitCLI, expand_words, run_and_exit
from lit_mnist.datamodule import MNISTDataModule
from lit_mnist.errors import InputError
from lit_mnist.models import make_net
from lit_mnist.module import LitClassifier
from lit_mnist.optim import make_optimizer, make_schedule
from lit_mnist.plugins.channels_last import convert_weights
from lit_mnist.plugins.precision import PrecisionName, resolve_precision
from lit_mnist.run import lock_run_dir, new_run_dir

# Options beside those of the model and the data that a hand-written engine follows, or that only affect the terminal.
_OPTIONS = {"config", "seed_everything", "ckpt_path", "max_restarts", "launcher"} | {
    f"trainer.{name}"
    for name in (
        *("accelerator", "devices", "num_nodes", "precision", "max_epochs", "max_steps", "limit_train_batches"),
        *("accumulate_grad_batches", "gradient_clip_val", "default_root_dir", "timeout"),
        *("enable_progress_bar", "enable_model_summary", "num_sanity_val_steps", "log_every_n_steps"),
    )
}


@dataclass(frozen=True)
class Experiment:
    """What an engine trains, and how.

    Attributes:
        engine: Name of the engine.
        model: Arguments of LitClassifier.
        data: Arguments of MNISTDataModule.
        ranks: The ranks, with their device type.
        precision: The precision that is used.
        max_epochs: Epochs to train; -1 for no limit.
        max_steps: Most optimizer steps; -1 for no limit.
        limit_train_batches: Batches of an epoch: a number or a share.
        accumulate: Micro-batches of an optimizer step.
        clip: Largest norm of the gradient, or None.
        folder: The run folder.
        ckpt_path: A checkpoint to resume from, or None.
        launcher: How ranks are started on this machine.
        max_restarts: How often the ranks are started again after one is lost.
        timeout: Seconds that a rank waits for the others.
        config: All options, for the run folder.
    """

    engine: str
    model: dict[str, Any]
    data: dict[str, Any]
    ranks: launch.Ranks
    precision: PrecisionName
    max_epochs: int
    max_steps: int
    limit_train_batches: float
    accumulate: int
    clip: float | None
    folder: Path
    ckpt_path: str | None
    launcher: Literal["fork", "spawn"]
    max_restarts: int
    timeout: float
    config: dict[str, Any]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and images."""
        return torch.float64 if self.precision == "64-true" else torch.float32

    @property
    def device_type(self) -> str:
        """`cuda` or `cpu`."""
        return self.ranks.device_type

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return torch.device("cpu" if self.device_type == "cpu" else f"cuda:{os.environ.get('LOCAL_RANK', '0')}")

    def move(self, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a batch on the device of this rank, in the dtype of the weights."""
        images, targets = batch
        return images.to(self.device, self.dtype), targets.to(self.device)

    def load_data(self) -> MNISTDataModule:
        """Returns the data, verified and split."""
        module = MNISTDataModule(**self.data)
        if place()[0] == 0:
            module.prepare_data()
        if dist.is_initialized():
            dist.barrier()
        module.setup("fit")
        return module

    def make_net(self, device: torch.device) -> nn.Module:
        """Returns the network in the channels-last memory format; its weights depend on the seed alone."""
        names = ("net", "num_classes", "dropout", "views", "seed")
        net = make_net(**{name: self.model[name] for name in names}).to(device, self.dtype)
        convert_weights(net, torch.channels_last)
        return net

    def make_optimizer(self, net: nn.Module) -> Optimizer:
        """Returns the optimizer of a network."""
        names = ("optimizer", "lr", "momentum", "nesterov", "weight_decay")
        return make_optimizer(net, **{name: self.model[name] for name in names})

    def make_schedule(self, optimizer: Optimizer, total_steps: int) -> LambdaLR:
        """Returns the schedule of an optimizer."""
        return make_schedule(optimizer, self.model["schedule"], total_steps=total_steps, warmup=self.model["warmup"])

    def count(self, batches: int) -> tuple[int, int, int]:
        """Returns the micro-batches of an epoch, its optimizer steps, and the optimizer steps of the whole run.

        Args:
            batches: Micro-batches of the training data.
        """
        limit = self.limit_train_batches
        batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
        steps = math.ceil(batches / self.accumulate)
        limits = [n for n in (self.max_steps, self.max_epochs * steps) if n >= 0]
        if not limits or not batches:
            raise InputError("trainer: max_epochs, max_steps and limit_train_batches must leave a number of steps.")
        return batches, steps, min(limits)


def place() -> tuple[int, int]:
    """Returns the rank of this process, and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def run_engine(
    engine: str, train: Callable[[Experiment], None], words: list[str] | None = None, *, one_process: bool = False
) -> None:
    """Parses the words of the command line, and calls `train(experiment)` in each rank, or in one process.

    Raises:
        SystemExit: The command has failed: see `lit_mnist.launch` for the exit codes.
    """
    words = sys.argv[1:] if words is None else words
    run_and_exit(lambda: _start(parse(engine, words), train, one_process))


def _start(experiment: Experiment, train: Callable[[Experiment], None], one_process: bool) -> None:
    ranks = experiment.ranks
    if ranks.are_started:
        if one_process:
            raise InputError(f"{experiment.engine} is one process. Start it without torchrun or srun.")
        launch.join_group(ranks.device_type, experiment.timeout)
        folder = [experiment.folder]
        dist.broadcast_object_list(folder, src=0)
        experiment = replace(experiment, folder=folder[0])
    if place()[0] == 0:
        config = experiment.folder / "config.yaml"
        lock = lock_run_dir(experiment.folder)  # noqa: F841 - it is held until the end of this function
        if config.exists() and not experiment.ckpt_path:
            raise InputError(f"trainer.default_root_dir: {experiment.folder} contains a run. Choose another --run-dir.")
        if not experiment.ckpt_path:
            config.write_text(yaml.safe_dump(experiment.config, sort_keys=False))

    def resume_last() -> tuple[Experiment]:
        last = experiment.folder / "checkpoints" / "last.ckpt"
        return (replace(experiment, ckpt_path=str(last)) if last.exists() else experiment,)

    launch.launch(
        train,
        (experiment,),
        ranks._replace(devices=1) if one_process else ranks,
        timeout=experiment.timeout,
        start_method=experiment.launcher,
        max_restarts=experiment.max_restarts,
        on_restart=resume_last,
    )


def parse(engine: str, words: list[str]) -> Experiment:
    """Returns the experiment of a command.

    Raises:
        InputError: An option is one that only a Trainer follows.
    """
    cli = _EngineCLI(expand_words(words))
    options = cli.parsed
    trainer, model, data = options.trainer, options.model, options.data
    for part, expected in ((model, LitClassifier), (data, MNISTDataModule)):
        if locate(part.class_path) is not expected:
            raise InputError(
                f"{engine} trains {expected.__name__}, not {part.class_path}, which python train.py trains."
            )
    if options.ckpt_path and engine != "raw_ddp":
        raise InputError(f"ckpt_path: {engine} cannot resume. raw_ddp and python train.py can.")
    if isinstance(trainer.devices, list) or "," in str(trainer.devices):
        raise InputError(f"trainer.devices: {engine} needs a number. Choose GPUs by CUDA_VISIBLE_DEVICES.")
    for key, value in options.items():
        accepted = ("auto", "ddp") if key == "trainer.strategy" else (cli.defaults.get(key),)
        if not key.startswith(("model", "data")) and key not in _OPTIONS and value not in accepted:
            raise InputError(f"{key}: {engine} does not have this option. Leave it out, or use python train.py.")
    ranks = launch.plan_ranks(trainer.accelerator, trainer.devices, trainer.num_nodes)
    if trainer.precision not in (None, "auto", *get_args(PrecisionName)):
        raise InputError(f"trainer.precision: {engine} needs auto or one of {', '.join(get_args(PrecisionName))}.")
    precision, reason = resolve_precision(trainer.precision or "32-true", ranks.device_type)
    if trainer.precision == "auto" and int(os.environ.get("RANK", "0")) == 0:
        print(reason)
    limited = trainer.max_epochs is not None or trainer.max_steps != -1
    return Experiment(
        engine=engine,
        model={**model.init_args.as_dict(), "seed": _seed(options, model)},
        data={**data.init_args.as_dict(), "seed": _seed(options, data)},
        ranks=ranks,
        precision=precision,
        max_epochs=(-1 if trainer.max_epochs is None else trainer.max_epochs) if limited else 1,
        max_steps=trainer.max_steps,
        limit_train_batches=1.0 if trainer.limit_train_batches is None else trainer.limit_train_batches,
        accumulate=trainer.accumulate_grad_batches,
        clip=trainer.gradient_clip_val,
        folder=Path(trainer.default_root_dir or new_run_dir(f"{model.init_args.net}-{engine}")),
        ckpt_path=options.ckpt_path,
        launcher=options.launcher,
        max_restarts=options.max_restarts,
        timeout=trainer.timeout,
        config=cli.saved,
    )


class _EngineCLI(LitCLI):
    """Parses, and instantiates nothing."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_argument("--launcher", type=Literal["fork", "spawn"], default="fork", help="How the ranks start.")

    def before_instantiate_classes(self) -> None:
        if self.subcommand != "train":
            raise InputError(f"{self.subcommand}: an engine trains and tests. Leave out the subcommand.")
        self.parsed: Namespace = self.options
        self.defaults: Namespace = self.parser.parse_args(expand_words([]))["train"]
        self.saved = json.loads(self.parser.dump(self.config, format="json", skip_unset=False))["train"]
        for name in ("max_restarts", "launcher"):
            self.saved.pop(name)
        self.saved["ckpt_path"] = self.saved["trainer"]["default_root_dir"] = None

    def instantiate_classes(self) -> None:
        self.subcommand = None  # LightningCLI runs nothing


def _seed(options: Namespace, part: Namespace) -> int:
    given = part.init_args.seed
    return int(options.seed_everything if given is None else given)
