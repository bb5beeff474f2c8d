"""Watches the functions that start ranks, and lets each of them start the number that the doctor runs.

Covers `torch.multiprocessing`, torchrun's agent and what is built on it (`accelerate launch`, `fabric run`,
`notebook_launcher`), Lightning's Trainer and Fabric, Slurm's and MPI's variables, and ranks that a program or a shell
script starts by hand: those that are too many end before they take part.
"""

import argparse
import ctypes
import dataclasses
import os
import re
import sys
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from types import ModuleType
from typing import Any

import torch.distributed as dist
import torch.multiprocessing

from ddp_doctor.after_import import after_import
from ddp_doctor.probes.wrap import wrap, wrap_everywhere
from ddp_doctor.records.recorder import is_user_file, user_frames

# The variables that tell a process its rank and the number of ranks.
_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("SLURM_PROCID", "SLURM_NPROCS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
_START_ARGUMENTS = ("fn", "args", "nprocs", "join", "daemon", "start_method")
_INIT_ARGUMENTS = ("backend", "init_method", "timeout", "world_size", "rank", "store", "group_name")
# The number of ranks that the program itself wanted, for the processes that it starts.
_WANTED = "DDP_DOCTOR_WANTED_RANKS"
# The import of the module of Fabric itself may have begun before torch was imported.
_TRAINERS = {
    "lightning.pytorch.trainer.trainer": "Trainer",
    "pytorch_lightning.trainer.trainer": "Trainer",
    "lightning.fabric.connector": "_Connector",
    "lightning_fabric.connector": "_Connector",
}

# What programs call their number of ranks; `num_workers` are those of a loader.
_NAME = re.compile(
    r"world|^ws$|n_?procs?(_|$)|nproc|num_?(proc|gpu|device|rank|replica)|n_?gpus?(_|$)|n_?(ranks|devices|replicas)"
    r"|^(gpus|devices|ranks|replicas|processes|size)$",
    re.IGNORECASE,
)
# So deep are settings in others.
_DEEPEST = 4


class Starters:
    """The hooks in the functions that start ranks."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def install(self) -> None:
        """Installs the hooks; ends this process if it is a rank too many."""
        self._read_environment()
        wrap_everywhere("start_processes", torch.multiprocessing.start_processes, self._on_start)
        wrap_everywhere("init_process_group", dist.init_process_group, self._on_init)
        after_import({"torch.distributed.launcher.api": self._watch_agent})
        after_import(dict.fromkeys(_TRAINERS, self._watch_trainer))

    @property
    def wanted(self) -> int | None:
        """The number of ranks that the program wanted, if it is another one and known."""
        number = os.environ.get(_WANTED)
        return int(number) if number is not None and int(number) != self.world_size else None

    def _read_environment(self) -> None:
        for rank, size in _VARIABLES:
            number = os.environ.get(size, "")
            if number.isdigit() and int(number) > self.world_size:
                self._leave_if_too_many(int(os.environ.get(rank, "0")))
                os.environ.setdefault(_WANTED, number)
                os.environ[size] = str(self.world_size)

    def _leave_if_too_many(self, rank: int) -> None:
        if rank >= self.world_size:
            sys.stdout.flush()
            os._exit(0)

    def _on_start(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kwargs |= dict(zip(_START_ARGUMENTS, args, strict=False))
        number = kwargs.get("nprocs", 1)
        if number != self.world_size and not dist.is_initialized() and not os.environ.get("TORCHELASTIC_RUN_ID"):
            # The function gets its number among its arguments, and names it to `init_process_group` at the latest.
            os.environ[_WANTED] = str(number)
            kwargs["nprocs"] = self.world_size
        return original(**kwargs)

    def _watch_agent(self, module: Any) -> None:
        def around(original: Callable[..., Any], agent: Any, config: Any, *args: Any, **kwargs: Any) -> None:
            wanted = config.nproc_per_node * config.max_nodes
            if wanted != self.world_size:
                os.environ[_WANTED] = str(wanted)
            changes: dict[str, Any] = {
                "min_nodes": 1,
                "max_nodes": 1,
                "nproc_per_node": self.world_size,
                "max_restarts": 0,
                # Another job may use the port that the command names.
                "rdzv_backend": "c10d",
                "rdzv_endpoint": "localhost:0",
                "rdzv_configs": {"timeout": 900},
                "run_id": f"doctor{os.getpid()}",
                "local_addr": "127.0.0.1",
            }
            original(agent, dataclasses.replace(config, **changes), *args, **kwargs)

        wrap(module.elastic_launch, "__init__", around)

    def _watch_trainer(self, module: Any) -> None:
        wrap(getattr(module, _TRAINERS[module.__name__]), "__init__", self._on_trainer)

    def _on_trainer(self, original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> None:
        devices = kwargs.get("devices", "auto")
        number = len(devices) if isinstance(devices, list | tuple) else devices
        if not args and str(number) != "1":
            if str(number).isdigit():
                os.environ[_WANTED] = str(number)
            kwargs["devices"] = self.world_size
        if "num_nodes" in kwargs:
            kwargs["num_nodes"] = 1
        for name, value in (("LT_DEVICES", self.world_size), ("LT_NUM_NODES", 1)):
            if name in os.environ:
                os.environ[name] = str(value)
        original(trainer, *args, **kwargs)

    def _on_init(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kwargs |= dict(zip(_INIT_ARGUMENTS, args, strict=False))
        number = _number(kwargs.get("world_size"), os.environ.get("WORLD_SIZE"))
        rank = _number(kwargs.get("rank"), os.environ.get("RANK"))
        if number is not None and (number > self.world_size or number == self.wanted):
            self._leave_if_too_many(rank or 0)
            os.environ.setdefault(_WANTED, str(number))
            os.environ["WORLD_SIZE"] = str(self.world_size)
            if kwargs.get("world_size", -1) != -1:
                kwargs["world_size"] = self.world_size
        result = original(**kwargs)
        if self.wanted is not None:
            change_program(self.wanted, self.world_size)
        return result


def _number(*values: Any) -> int | None:
    """Returns the first value that is a number from 0."""
    return next((int(value) for value in values if str(value).isdigit()), None)


def change(values: MutableMapping[Any, Any], old: int, new: int, depth: int = 0) -> None:
    """Changes the program's number of ranks to that which is run, among named values and in settings that they hold."""
    for name, value in list(values.items()):
        if not isinstance(name, str) or name.startswith("__"):
            continue
        if type(value) is int and value == old and _NAME.search(name):
            values[name] = new
        held = value if isinstance(value, MutableMapping) else _settings(value)
        if depth < _DEEPEST and isinstance(held, MutableMapping):
            # An object of the user may permit no change.
            with suppress(Exception):
                change(held, old, new, depth + 1)


def _settings(value: Any) -> Any:
    """Returns the attributes of options and of objects of the user's classes."""
    if isinstance(value, type | ModuleType) or callable(value):
        return None
    module = sys.modules.get(type(value).__module__)
    if isinstance(value, argparse.Namespace) or dataclasses.is_dataclass(value) or _is_of_user(module):
        return getattr(value, "__dict__", None)
    return None


def _is_of_user(module: Any) -> bool:
    return isinstance(module, ModuleType) and is_user_file(getattr(module, "__file__", None) or "")


def change_program(old: int, new: int) -> None:
    """Changes the numbers in the frames that are running, and in the modules of the user."""
    for frame in user_frames():
        # A spawned process runs functions whose globals are a copy of those of the module.
        change(frame.f_globals, old, new)
        if frame.f_code.co_name != "<module>":
            change(frame.f_locals, old, new)
            # As Python 3.13 does by itself.
            with suppress(AttributeError):
                ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
    for module in filter(_is_of_user, list(sys.modules.values())):
        change(vars(module), old, new)
