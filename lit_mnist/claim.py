"""Claims the run folder of a job, and puts there what it goes on from."""

from __future__ import annotations

from pathlib import Path

from lit_mnist.configure import Configuration
from lit_mnist.errors import InputError
from lit_mnist.experiment import SCENE_NAMES
from lit_mnist.flags import CommandLine
from lit_mnist.predict.scenes import MASKS, OVERLAYS
from lit_mnist.ranks import Rank, launched_from_outside, print_once, warn_once
from lit_mnist.record import GRID, PREDICTIONS
from lit_mnist.resume import Saved
from lit_mnist.training.checkpoint import BEST, LAST
from lit_mnist.training.checkpoint_folder import remove_unfit
from lit_mnist.training.faults import injected
from lit_mnist.training.files import copy_file
from lit_mnist.training.history import read_history
from lit_mnist.training.run_folder import CONFIG, METRICS, REPORT, RESULT, RunFolder, default_path, was_restarted

# A rank of before may still hold the folder when its successor is there already.
_SECONDS_TO_LET_GO = 30.0
_WRITES = {
    "train": (CONFIG, RESULT, METRICS, REPORT, "checkpoints"),
    "fit": (CONFIG, RESULT, METRICS, REPORT, "checkpoints"),
    "validate": (CONFIG, RESULT, REPORT),
    "test": (CONFIG, RESULT, REPORT),
    "predict": (PREDICTIONS, GRID, MASKS, OVERLAYS),
}


def claim_folder(line: CommandLine, configuration: Configuration, saved: Saved | None) -> tuple[Path, RunFolder | None]:
    """Returns the run folder's path, and on the process that writes the claimed folder.

    Args:
        line: The command line.
        configuration: What it and its files say.
        saved: The checkpoint that the job begins with.

    Raises:
        InputError: The folder is another run's, cannot be written, or has a name that not all ranks know.
    """
    experiment, checkpoint = configuration.experiment, saved.path if saved else None
    trains = line.trains
    origin = _run_folder_of(checkpoint) if checkpoint and trains else None
    chosen = Path(experiment.run.dir) if experiment.run.dir else origin
    name = experiment.model.net if line.verb == "train" else f"{experiment.model.net}-{line.verb}"
    writes = not launched_from_outside() or Rank.from_environment().is_first
    each_writes = experiment.run.trace != "none" or (line.verb == "predict" and experiment.data.name in SCENE_NAMES)
    if chosen is None and each_writes and launched_from_outside() and Rank.from_environment().world_size > 1:
        raise InputError("Every rank writes into the run folder: name it to all of them by --run-dir.")
    path = (chosen or default_path(name, make=writes)).absolute()
    if not writes:
        return path, None
    again = origin is not None and path.resolve() == origin
    restarted = trains and was_restarted(path)
    if again:
        read_history(path)
    folder = RunFolder.claim(
        path,
        writes=_WRITES[line.verb],
        folders=("checkpoints", "tensorboard") if trains else (),
        resumed=again or restarted or (line.resume == "auto" and not (path / RESULT).exists()),
        patience=_SECONDS_TO_LET_GO if restarted else 0,
    )
    try:
        if trains:
            _fill(folder, saved, goes_on_here=again or restarted)
        if line.verb != "predict":
            folder.write_config(experiment.replace("run", dir=None, resume=None, inject=None).to_dict())
    except OSError as error:
        folder.release()
        raise InputError(f"The run folder {path} cannot be written: {error.strerror}.") from error
    if line.verb != "predict" and configuration.extras.names:
        left_out = ", ".join(f"trainer.{name}" for name in configuration.extras.names)
        print_once(f"note: {CONFIG} leaves out {left_out}: only plain values are stored")
    return path, folder


def _run_folder_of(checkpoint: Path) -> Path | None:
    """Returns the run folder that a checkpoint lies in, or None where it lies elsewhere."""
    folder = checkpoint.resolve().parent
    return folder.parent if folder.name == "checkpoints" and (folder.parent / CONFIG).exists() else None


def _fill(folder: RunFolder, saved: Saved | None, *, goes_on_here: bool) -> None:
    """Puts the checkpoints that a training goes on from into its folder."""
    if not goes_on_here:
        injected(folder.path).unlink(missing_ok=True)
    if saved is None:
        return
    if not goes_on_here:
        # The best epoch so far comes along; where it is not known, that is the checkpoint itself.
        best = saved.path.parent / BEST
        copy_file(best if best.is_file() else saved.path, folder.checkpoints / BEST)
        copy_file(saved.path, folder.checkpoints / LAST)
    remove_unfit(folder.checkpoints / BEST, saved.step, warn_once)
