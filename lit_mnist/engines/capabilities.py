"""What an engine offers: each says so in its own file, and what it does not offer is refused by name."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import torch

from lit_mnist.distributed.devices import Devices
from lit_mnist.distributed.rank import launched_from_outside
from lit_mnist.errors import InputError, nearest
from lit_mnist.experiment import Command, Experiment
from lit_mnist.training.precision import resolve_precision

ENGINES = (
    "lightning",
    "raw_ddp",
    "single",
    "data_parallel",
    "parameter_server",
    "fabric",
    "with_accelerate",
    "with_hf_trainer",
)
INSTALL = "pip install 'lit_mnist[engines]'"


@dataclass(frozen=True)
class Capabilities:
    """What an engine offers beyond training and testing.

    Attributes:
        processes: `ranks`: one process for each device; `one`: one process on one device; `devices`: one process for
            all devices.
        commands: The commands.
        resume: Whether a run can be saved within an epoch, gone on with, and restarted by itself.
        half: Where it computes in float16.
        any_gpus: Whether it takes GPUs other than the first ones.
        spawn: Whether its ranks can be started by torch.multiprocessing.spawn.
        servers: Whether it has parameter servers.
        extras: Whether it takes further options of Lightning's Trainer.
        compile: Whether its network can be compiled, on one device.
        graph: Whether it can record the passes of a micro-batch as a CUDA graph, on one GPU.
    """

    processes: Literal["ranks", "one", "devices"] = "ranks"
    commands: tuple[Command, ...] = ("train", "fit")
    resume: bool = False
    half: Literal["everywhere", "cuda", "nowhere"] = "cuda"
    any_gpus: bool = True
    spawn: bool = False
    servers: bool = False
    extras: bool = False
    compile: bool = False
    graph: bool = False

    def check(self, engine: str, command: Command, experiment: Experiment, extras: tuple[str, ...]) -> None:
        """Refuses, by name, what the engine cannot do.

        Raises:
            InputError: Something is asked for that it does not do.
        """
        run = experiment.run
        asked = {
            command: command not in self.commands,
            "run.resume": run.resume is not None and not self.resume,
            "run.save_every": run.save_every is not None and not self.resume,
            "run.max_restarts": run.max_restarts > 0 and not self.resume,
            "torchrun's --max-restarts": launched_from_outside() and _restarts() > 0 and not self.resume,
            "run.inject": run.inject is not None and self.processes == "devices",
            "run.launcher spawn": run.launcher == "spawn" and not self.spawn,
            "run.servers": run.servers > 1 and not self.servers,
            f"trainer.{(*extras, '')[0]}": bool(extras) and not self.extras,
        }
        for name, refused in asked.items():
            if refused:
                raise InputError(f"The engine {engine} does not offer {name}: use the engine {_engines_with(name)}.")

    def check_devices(self, engine: str, experiment: Experiment, devices: Devices, world_size: int) -> None:
        """Refuses devices and precisions that the engine does not compute on.

        Raises:
            InputError: There are too many or too few, or float16 on a CPU is not float16.
        """
        if self.processes == "one" and world_size > 1:
            raise InputError(f"The engine {engine} computes on one device, not on {world_size}: use --devices 1.")
        if self.processes == "devices" and launched_from_outside():
            raise InputError(f"The engine {engine} is one process on all devices: start it without a launcher.")
        if self.processes == "devices" and (devices.kind != "cuda" or devices.count < 2):
            found = f"{devices.count} GPU is" if devices.kind == "cuda" else "no GPU is"
            raise InputError(f"The engine {engine} spreads a batch over at least two GPUs, but {found} used here.")
        # Several ranks take the first GPUs, a lone process all that it sees.
        taken = torch.cuda.device_count() if world_size == 1 else devices.count
        if not self.any_gpus and devices.kind == "cuda" and devices.numbers != tuple(range(taken)):
            raise InputError(
                f"The engine {engine} takes the first GPUs, or alone all: choose by CUDA_VISIBLE_DEVICES instead."
            )
        if experiment.model.compile and (world_size > 1 or not self.compile):
            raise InputError(
                "model.compile is offered on one device, by the engines lightning and single: torch.compile fails "
                "where DistributedDataParallel splits its graph. Leave it out, or use --devices 1."
            )
        precision = resolve_precision(experiment.trainer.precision, devices.kind)
        if precision == "16-mixed" and (self.half == "nowhere" or (self.half == "cuda" and devices.kind == "cpu")):
            raise InputError(
                f"The engine {engine} does not compute in float16{' on a CPU' if self.half == 'cuda' else ''}: choose "
                "another --precision, or the engine lightning, raw_ddp, fabric or single."
            )
        if self.processes == "devices" and (precision == "bf16-mixed" or experiment.trainer.sync_batchnorm):
            what = "bf16-mixed" if precision == "bf16-mixed" else "trainer.sync_batchnorm"
            raise InputError(f"The engine {engine} does not offer {what}: its threads do not take it over.")

    def uses_cuda_graph(
        self, engine: str, experiment: Experiment, devices: Devices, world_size: int, extras: tuple[str, ...]
    ) -> bool:
        """Returns whether the passes of a micro-batch are recorded as a CUDA graph.

        Raises:
            InputError: It is asked for and cannot be done.
        """
        run = experiment.run
        # What watches the network from outside would see nothing of a graph.
        reasons = {
            f"the engine {engine} records none": not self.graph,
            f"this trains on {devices.kind}": devices.kind != "cuda",
            f"there are {world_size} ranks": world_size > 1,
            f"{experiment.model.net} is not the convnet": experiment.model.net != "convnet",
            "trainer.accumulate_grad_batches is above 1": experiment.trainer.accumulate_grad_batches > 1,
            f"run.trace is {run.trace}": run.trace != "none",
            "run.inject is given": run.inject is not None,
            f"trainer.{(*extras, '')[0]} is given": bool(extras),
        }
        found = [reason for reason, holds in reasons.items() if holds]
        if run.cuda_graph and found:
            raise InputError(
                f"run.cuda_graph is for the convnet on one GPU, by the engines lightning and single, but {found[0]}: "
                "leave it out."
            )
        return not found and run.cuda_graph is not False


def load_engine(name: str) -> ModuleType:
    """Imports an engine.

    Raises:
        InputError: There is none of that name, or its library is not installed.
    """
    if name not in ENGINES:
        raise InputError(f"Unknown engine {name!r}{nearest(name, ENGINES) or ': use ' + ', '.join(ENGINES) + '.'}")
    try:
        return importlib.import_module(f"lit_mnist.engines.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in {"accelerate", "transformers"}:
            raise
        raise InputError(f"The engine {name} needs {error.name.split('.')[0]}: {INSTALL}") from error


def _restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def _engines_with(name: str) -> str:
    if name.startswith("trainer."):
        return "lightning"
    others = {"run.servers": "parameter_server", "run.launcher spawn": "raw_ddp"}
    return others.get(name, "lightning, raw_ddp or single")
