"""Installs the doctor's probes in each Python that a command starts, as soon as it has imported torch.

The doctor puts this folder first on PYTHONPATH. Python imports a module of this name at its start.
"""

from __future__ import annotations

import atexit
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any


class _AfterTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torch as usual, and installs the probes after its import."""

    loader: Any = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds torch by the other finders."""
        if fullname != "torch":
            return None
        # Some packages look for torch before anybody imports it.
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        sys.meta_path.insert(0, self)
        if spec is None:
            if os.environ.get("DDP_DOCTOR_RUN"):
                _report_missing("torch")
        else:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        """Creates the module as its own loader does."""
        return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        """Imports torch, and installs the probes."""
        sys.meta_path.remove(self)
        # Resources of the package are found by its own loader.
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        if os.environ.get("DDP_DOCTOR_WATCH"):
            _watch(os.environ["DDP_DOCTOR_WATCH"])
            return
        if importlib.util.find_spec("ddp_doctor") is None:
            _report_missing("ddp_doctor")
        from ddp_doctor.launch.rank import observe

        observe(Path(os.environ["DDP_DOCTOR_RUN"]))


def _watch(folder: str) -> None:
    """Watches this process; a process in which that fails runs unwatched."""
    package = str(Path(__file__).parents[3])
    sys.path.append(package)
    try:
        from ddp_doctor.watch.rank import Watch

        Watch(Path(folder)).install()
    except Exception as error:
        print(f"ddp-doctor watch: this process is not watched: {error}", file=sys.stderr)
    finally:
        sys.path.remove(package)


def _report_missing(package: str) -> None:
    """Tells the doctor what this Python lacks; it may not be the one that the doctor runs in."""
    path = Path(os.environ["DDP_DOCTOR_RUN"], f"missing-{os.getpid()}.json")
    path.write_text(json.dumps([sys.executable, package]))


def _run_the_next() -> None:
    """Runs the sitecustomize that this one hides."""
    here = str(Path(__file__).parent)
    others = [entry for entry in sys.path if entry != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _start_with_own_hash_seed() -> None:
    """Starts this Python again if it is not rank 0, since ranks that are started separately order sets differently."""
    number = next((os.environ[name] for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID") if os.environ.get(name)), "0")
    if number.isdigit() and number != "0" and os.environ.get("PYTHONHASHSEED") == "1":
        os.environ["PYTHONHASHSEED"] = str(int(number) + 1)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606


if os.environ.get("DDP_DOCTOR_FORKS"):
    # Whatever fails here, the program is run as usual.
    with suppress(Exception):
        from ddp_doctor.launch.proxy import run_elsewhere

        run_elsewhere()
if os.environ.get("DDP_DOCTOR_HASH_SEED"):
    _start_with_own_hash_seed()
_run_the_next()
if os.environ.get("DDP_DOCTOR_RUN") or os.environ.get("DDP_DOCTOR_WATCH"):
    sys.meta_path.insert(0, _AfterTorch())
if os.environ.get("DDP_DOCTOR_RUN"):
    # Runs last, and lets Python not search all of torch for garbage, for up to a second, before it ends anyway.
    atexit.register(gc.freeze)
