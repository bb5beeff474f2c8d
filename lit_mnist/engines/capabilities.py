"""The capabilities of the engines, and the checks that reject other requests. It does not import torch."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal

from lit_mnist.distributed.rank import launched_from_outside
from lit_mnist.errors import InputError, nearest
from lit_mnist.experiment.schema import options
from lit_mnist.run.settings import Command

INSTALL = "pip install accelerate transformers"
ALL_COMMANDS: tuple[Command, ...] = ("train", "fit", "validate", "test", "predict")


@dataclass(frozen=True)
class Capabilities:
    """The capabilities of an engine.

    Attributes:
        processes: `ranks` for one process per device, `one` for one process on one device, `devices` for one process on
            all devices.
        commands: Supported commands.
        resume: Whether runs are saved within an epoch, can be resumed, and restart automatically.
        half: Devices on which float16 is supported.
        any_gpus: Whether GPUs other than the first ones are supported.
        spawn: Whether ranks can be new Python processes instead of forks.
        servers: Whether there are parameter servers.
        extras: Whether further options of Lightning's Trainer are accepted.
        compile: Whether the network can be compiled on one device.
        graph: Whether the steps can run as CUDA graphs on one GPU.
        libraries: Required libraries of the extra `engines`.
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
    libraries: tuple[str, ...] = ()

    @property
    def unsupported(self) -> frozenset[str]:
        """Keys of the options that must keep their defaults."""
        supported = {
            "run.resume": self.resume,
            "run.save_every": self.resume,
            "run.max_restarts": self.resume,
            "run.inject": self.processes != "devices",
            "run.launcher": self.spawn,
            "run.servers": self.servers,
            "run.cuda_graph": self.graph,
            "model.compile": self.compile,
            "trainer.sync_batchnorm": self.processes != "devices",
        }
        return frozenset(key for key, holds in supported.items() if not holds)


CAPABILITIES = {
    "lightning": Capabilities(
        commands=ALL_COMMANDS, resume=True, half="everywhere", spawn=True, extras=True, compile=True, graph=True
    ),
    "raw_ddp": Capabilities(commands=ALL_COMMANDS, resume=True, half="everywhere", spawn=True),
    "single": Capabilities(
        processes="one", commands=ALL_COMMANDS, resume=True, half="everywhere", compile=True, graph=True
    ),
    "data_parallel": Capabilities(processes="devices"),
    "parameter_server": Capabilities(servers=True, half="nowhere"),
    "fabric": Capabilities(half="everywhere"),
    "with_accelerate": Capabilities(any_gpus=False, libraries=("accelerate",)),
    "with_hf_trainer": Capabilities(any_gpus=False, libraries=("accelerate", "transformers")),
}
ENGINES = tuple(CAPABILITIES)


def check_engine(engine: str, command: Command, settings: Mapping[str, Any], extras: tuple[str, ...] = ()) -> None:
    """Rejects requests that the engine does not support on any device.

    Args:
        engine: Name of the engine.
        command: The command.
        settings: The given settings, converted, with dotted keys.
        extras: The given further options of Lightning's Trainer.

    Raises:
        InputError: The engine is unknown or not installed, or does not support the request.
    """
    if engine not in CAPABILITIES:
        raise InputError(f"Unknown engine {engine!r}{nearest(engine, ENGINES) or ': use ' + ', '.join(ENGINES) + '.'}")
    own = CAPABILITIES[engine]
    for library in own.libraries:
        if find_spec(library) is None:
            raise InputError(f"The engine {engine} needs {library}: {INSTALL}")
    if command not in own.commands:
        _reject(engine, command, [name for name in ENGINES if command in CAPABILITIES[name].commands])
    for key in sorted(own.unsupported):
        value = settings.get(key)
        if value and value != options()[key].default:
            name = "run.launcher spawn" if key == "run.launcher" else key
            _reject(engine, name, [name for name in ENGINES if key not in CAPABILITIES[name].unsupported])
    if extras and not own.extras:
        _reject(engine, f"trainer.{extras[0]}", ["lightning"])
    precision = settings.get("trainer.precision")
    if precision == "16-mixed" and own.half == "nowhere":
        reject_half(engine, "")
    if precision == "bf16-mixed" and own.processes == "devices":
        raise InputError(f"The engine {engine} does not support bf16-mixed: its threads do not inherit autocast.")
    wanted = settings.get("trainer.devices", 1)
    count = len(wanted) if isinstance(wanted, list) else wanted
    if own.processes == "one" and count not in {"auto", 1}:
        raise InputError(f"The engine {engine} computes on one device, not on {count}: use --devices 1.")
    if launched_from_outside():
        if own.processes == "devices":
            raise InputError(f"The engine {engine} is one process on all devices: start it without a launcher.")
        if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) and not own.resume:
            _reject(engine, "torchrun's --max-restarts", [name for name in ENGINES if CAPABILITIES[name].resume])


def reject_half(engine: str, where: str) -> None:
    """Rejects float16 on an engine.

    Raises:
        InputError: Always.
    """
    others = [name for name in ENGINES if CAPABILITIES[name].half == "everywhere"]
    raise InputError(
        f"The engine {engine} does not compute in float16{where}: choose another --precision, or the engine "
        f"{_either(others)}."
    )


def load_engine(name: str) -> ModuleType:
    """Imports the module of an engine, which imports torch."""
    return importlib.import_module(f"lit_mnist.engines.{name}")


def _reject(engine: str, what: str, others: list[str]) -> None:
    raise InputError(f"The engine {engine} does not support {what}: use the engine {_either(others)}.")


def _either(names: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
