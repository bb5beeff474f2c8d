"""Training and comparing from a notebook.

    from lit_mnist import compare, train
    result = train("raw_ddp", devices=2, epochs=1)
    result["test"]["accuracy"]

The ranks run in processes of a new Python. They do not depend on what the notebook has imported or put on a GPU, and
interrupting the cell stops them.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_mnist.checkpoint.config import flatten
from lit_mnist.comparison.command import JSON
from lit_mnist.engines.capabilities import ENGINES
from lit_mnist.errors import InputError, LitMnistError
from lit_mnist.experiment.registry import registered_by
from lit_mnist.run.folder import RESULT, default_path


def train(
    engine: str = "lightning",
    *,
    devices: int = 1,
    settings: Mapping[str, Any] | None = None,
    imports: Sequence[str] = (),
    **flags: Any,
) -> dict[str, Any]:
    """Trains, tests the best weights, and returns the content of `result.json`; prints the output of the run.

    Times in the result are in seconds, memory in bytes:

        result = train("raw_ddp", devices=2, max_steps=20)
        result["test"]["accuracy"]  # from 0 to 1

    Args:
        engine: Name of the engine.
        devices: Number of ranks.
        settings: Sections of the experiment, such as `{"model": {"net": "basicnet"}}`.
        imports: Packages of your own, which register networks or data sets.
        **flags: The command line's short flags, with underscores: `epochs`, `batch_size`, `lr`, `run_dir`, ...

    Raises:
        InputError: The engine or a setting is rejected.
        LitMnistError: The run failed; its `exit_code` is the command line's.
    """
    if engine not in ENGINES:
        raise InputError(f"Unknown engine {engine!r}: use {', '.join(ENGINES)}.")
    words = [f"--devices={devices}", *_words(settings, imports, flags)]
    return _run([f"lit_mnist.engines.{engine}", *words], flags.get("run_dir"), "train", RESULT)


def compare(
    engines: str = "all",
    *,
    devices: int = 1,
    settings: Mapping[str, Any] | None = None,
    imports: Sequence[str] = (),
    **flags: Any,
) -> dict[str, Any]:
    """Compares engines, and returns the content of `comparison.json`; a difference is not an error, see its `equal`.

    Each engine trains the same experiment:

        compared = compare("lightning,raw_ddp", devices=2, max_steps=20)
        assert compared["equal"]

    Args:
        engines: `all`, or names, as a list or separated by commas.
        devices: Number of ranks.
        settings: Sections of the experiment.
        imports: Packages of your own.
        **flags: As for `train`; also `repeats` and `timed_steps`.

    Raises:
        InputError: An engine or a setting is rejected.
        LitMnistError: A run failed; its `exit_code` is the command line's.
    """
    names = engines if isinstance(engines, str) else ",".join(engines)
    words = [f"--engines={names}", f"--devices={devices}", *_words(settings, imports, flags)]
    return _run(["lit_mnist.cli.main", "compare", *words], flags.get("run_dir"), "compare", JSON)


def _words(settings: Mapping[str, Any] | None, imports: Sequence[str], flags: Mapping[str, Any]) -> list[str]:
    if not imports:
        _reject_cells(settings)
    short = {name.replace("_", "-"): value for name, value in flags.items()}
    words = [f"--{name}={_text(value)}" for name, value in [*short.items(), *flatten(settings or {})]]
    return [*(f"--import={name}" for name in imports), *words]


def _reject_cells(settings: Mapping[str, Any] | None) -> None:
    """Raises an InputError for a network or data set that only this process has registered."""
    for own in registered_by(dict(flatten(settings or {}))):
        module = own.make.__module__
        todo = f"give imports=[{module!r}]"
        if module == "__main__":
            todo = "write it to a file in this folder, such as my_parts.py, and give imports=['my_parts']"
        raise InputError(f"{own.title} is registered in this process only, but the ranks run in a new Python: {todo}.")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(value) if isinstance(value, Path) else json.dumps(value)


def _run(module_and_words: list[str], run_dir: str | Path | None, name: str, written: str) -> dict[str, Any]:
    """Runs a module to its end, and returns the JSON file that it wrote into its run folder."""
    folder = Path(run_dir) if run_dir else default_path(f"notebook-{name}")
    command = [sys.executable, "-m", *module_and_words, *([] if run_dir else [f"--run-dir={folder}"])]
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    print(line, end="", flush=True)
            except KeyboardInterrupt:
                process.send_signal(signal.SIGINT)
                print(process.stdout.read(), end="")
                process.wait()
                errors.seek(0)
                # It says where the run was saved and how to resume it.
                print(errors.read(), end="", flush=True)
                raise
        errors.seek(0)
        message = errors.read().strip()
    if process.returncode not in ({0, 1} if name == "compare" else {0}):
        error = (InputError if process.returncode == InputError.exit_code else LitMnistError)(
            message.rpartition("error: ")[2]
        )
        error.exit_code = process.returncode
        raise error
    return dict(json.loads((folder / written).read_text()))
