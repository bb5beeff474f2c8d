"""Installs the doctor's probes in each Python that a command starts, as soon as it has imported torch.

The doctor puts this folder first on PYTHONPATH. Python imports a module of this name at its start.
"""

import atexit
import gc
import importlib.machinery
import importlib.util
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# Before the program changes it.
BEGUN = dict(os.environ)


def _module(spec: Any) -> Any:
    """Runs the module of a specification."""
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _observe(_: Any) -> None:
    """Installs the probes of a run."""
    from ddp_doctor.launch.rank import observe

    observe(Path(os.environ["DDP_DOCTOR_RUN"]), BEGUN)


def _watch(_: Any) -> None:
    """Watches this process; a process in which that fails runs unwatched."""
    package = str(HERE.parents[2])
    sys.path.append(package)
    try:
        from ddp_doctor.watch.rank import Watch

        Watch(Path(os.environ["DDP_DOCTOR_WATCH"])).install()
    except Exception as error:
        print(f"ddp-doctor watch: this process is not watched: {error}", file=sys.stderr)
    finally:
        sys.path.remove(package)


def _start_with_own_hash_seed() -> None:
    """Starts this Python again if it is not rank 0, since ranks that are started separately order sets differently."""
    number = next((os.environ[name] for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID") if os.environ.get(name)), "0")
    if number.isdigit() and number != "0" and os.environ.get("PYTHONHASHSEED") == "1":
        os.environ["PYTHONHASHSEED"] = str(int(number) + 1)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606


if os.environ.get("DDP_DOCTOR_FORKS"):
    # Whatever fails here, the program is run as usual.
    with suppress(Exception):
        from ddp_doctor.launch.program_forks import run_elsewhere

        run_elsewhere()
if os.environ.get("DDP_DOCTOR_HASH_SEED"):
    _start_with_own_hash_seed()
# The sitecustomize that this one hides.
if hidden := importlib.machinery.PathFinder.find_spec(
    "sitecustomize", [path for path in sys.path if path != str(HERE)]
):
    _module(hidden)
# This Python may lack the package.
after_import = _module(
    importlib.util.spec_from_file_location("after_import", HERE.parents[1] / "after_import.py")
).after_import
if os.environ.get("DDP_DOCTOR_WATCH"):
    after_import({"torch": _watch})
elif os.environ.get("DDP_DOCTOR_RUN"):
    after_import({"torch": _observe})
    # Runs last, and lets Python not search all of torch for garbage, for up to a second, before it ends anyway.
    atexit.register(gc.freeze)
