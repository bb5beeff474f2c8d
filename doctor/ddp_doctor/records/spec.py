"""What one run of the examination shall do; the parent writes it, and each rank reads it. Imports no torch."""

import pickle
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_doctor.errors import InputError

PACKAGE = str(Path(__file__).parents[1])
_FILE = "spec"
# The environment variable that names the folder of a run to the processes of a command.
FOLDER = "DDP_DOCTOR_RUN"
# Files in this folder: a rank writes `done<R>` when it has recorded everything; the parent writes `stop` when the time
# is over, and the ranks then `written<R>` when they have recorded what they did until then.
STOP, WRITTEN = "stop", "written"
# The name of the generators that the program has created.
OWN = "a generator that the program has created"
# What follows the word of a number in parentheses.
BRACKETED = " in parentheses"
# What Lightning adds to the name under which a module logs a value.
_ADDED = re.compile(r"(_step|_epoch)?(/dataloader_idx_\d+)?$")
# Times the steps per epoch, for what a program does every few steps only.
_LONGER = 8


@dataclass(frozen=True)
class Target:
    """What is examined.

    Attributes:
        name: `package.module:name` or `path/to/file.py:name`; empty for a command.
        data: The same for a LightningDataModule, or empty.
        args: Further arguments of a function.
        command: The words of a command, or empty.
    """

    name: str = ""
    data: str = ""
    args: tuple[str, ...] = ()
    command: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name or " ".join(self.command)


@dataclass(frozen=True)
class Spec:
    """One run.

    Attributes:
        target: What is examined.
        purpose: `train`: two short epochs with their evaluation, to the end of the program. `numbers`: the first steps
            of one epoch. `bare`: without any probe, to see whether the code runs alone.
        world_size: Number of ranks.
        steps: Optimizer steps per epoch.
        samples: Most samples of an evaluation per process, and of a stream.
        double: Whether everything is computed in 64 bits.
        seed: Seed of rank 0; other ranks add their number, as ranks that are started separately differ.
        same_seed: Whether all ranks have the same seed.
        timeout: Seconds after which the run counts as hung.
        feed: Folder of the run whose batches and draws this process is given, concatenated; or empty.
        later: Whether the program trains on after the numbers, with a record of its own, without tensors.
        whole_epochs: Whether the epochs of a `train` run are not shortened, for code that counts its own samples.
        gpus: Number of GPUs that are emulated on the CPU; 0 if torch is as it is.
        real_gpus: Whether the code sees the GPUs of the machine.
        may_emulate: Whether GPUs may be emulated if the code needs one.
        interventions: What else is changed, with its value. Fixes that are tried: `set_epoch`, `no_workers`,
            `sync_batch_norm`, `find_unused`. Observation: `branches`. The reference: `ranks` (how many are joined) and
            `micro_batches`. Unchanged weights for metrics: `still`, with `other_weights`, `perturb`, `factor`. Equal
            draws: `seeds`. The derivative: `move`. A restart: `until_saved`, then `started_again` and `resume_by`.
    """

    target: Target
    purpose: str = "train"
    world_size: int = 1
    steps: int = 3
    samples: int = 512
    double: bool = False
    seed: int = 20_250
    same_seed: bool = False
    timeout: float = 60.0
    feed: str = ""
    later: bool = False
    whole_epochs: bool = False
    gpus: int = 0
    real_gpus: bool = False
    may_emulate: bool = False
    interventions: dict[str, Any] = field(default_factory=dict)

    @property
    def epochs(self) -> int:
        """Training epochs that are recorded."""
        return 1 if self.purpose == "numbers" else 2

    @property
    def most_steps(self) -> int:
        """Optimizer steps that an epoch has at most."""
        return _LONGER * self.steps if self.later else self.steps

    @property
    def continues(self) -> bool:
        """Whether the code sees what the run before has written."""
        return bool(self.interventions.get("started_again"))

    def write(self, folder: Path) -> None:
        """Writes the file that `read` reads."""
        (folder / _FILE).write_bytes(pickle.dumps(self))


def read(folder: Path) -> Spec:
    """Reads what `Spec.write` wrote."""
    found: Spec = pickle.loads((folder / _FILE).read_bytes())  # noqa: S301
    return found


def logged_name(name: str) -> str:
    """Returns the name under which a module logs a metric of Lightning's Trainer."""
    return _ADDED.sub("", name)


def target_name(target: Any) -> str:
    """Returns the name of a class or function by which a new process imports it.

    Raises:
        InputError: It is not at the top level of a module in a file.
    """
    if target is None or isinstance(target, str):
        return target or ""
    module, name = getattr(target, "__module__", ""), getattr(target, "__qualname__", "")
    path = getattr(sys.modules.get(module), "__file__", None)
    if not name or "<locals>" in name or (module == "__main__" and not path):
        raise InputError(f"{target!r} must be a class or a function at the top level of a module, in a file.")
    return f"{path}:{name}" if path and "." not in module else f"{module}:{name}"
