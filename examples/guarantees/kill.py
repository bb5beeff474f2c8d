"""Kills a rank of before.py and of after.py, starts each again, and compares the weights with an uninterrupted run.

The uninterrupted run is that of before.py, which has a stock Trainer without plugins.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

STEP = 25


def main() -> None:
    """Prints one line per script."""
    folder = Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory() as whole:
        run(folder / "before.py", whole)
        for name in ("before.py", "after.py"):
            with tempfile.TemporaryDirectory() as killed:
                run(folder / name, killed, kill_at=STEP)
                run(folder / name, killed)
                difference = compare(Path(whole), Path(killed))
            result = f"weights differ by up to {difference:.4f}" if difference else "weights are bit-identical"
            print(f"{name:9}  killed at step {STEP} and started again: {result}", flush=True)


def run(script: Path, folder: str, kill_at: int | None = None) -> None:
    """Runs a script in a folder until it ends, or until its second rank is killed.

    Raises:
        RuntimeError: It ends where it should not, or the other way round.
    """
    environment = {**os.environ, **({} if kill_at is None else {"KILL_AT": str(kill_at)})}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if (done.returncode == 0) is not (kill_at is None):
        raise RuntimeError(f"{script.name} ended with exit code {done.returncode}:\n{done.stderr}")


def compare(whole: Path, killed: Path) -> float:
    """Returns the largest absolute difference of two trained networks."""
    first, second = (torch.load(folder / "weights.pt", weights_only=True) for folder in (whole, killed))
    return max((first[name].double() - second[name].double()).abs().max().item() for name in first)


if __name__ == "__main__":
    main()
