"""`lit-mnist new FOLDER`: a small project of the user's own, copied from `examples/template`."""

import argparse
import shlex
import shutil
from pathlib import Path

from lit_mnist.errors import InputError

TEMPLATE = Path(__file__).parent / "template"
_LEFT_BEHIND = shutil.ignore_patterns("__pycache__", ".pytest_cache", "runs")


def main(words: list[str]) -> None:
    """Copies the template to a folder, and prints the next commands.

    Args:
        words: The words of the command after `new`.

    Raises:
        InputError: The folder is not empty, or cannot be written.
    """
    parser = argparse.ArgumentParser(
        prog="lit-mnist new", description="Creates a project with a module, data and tests of your own."
    )
    parser.add_argument("folder", type=Path, help="a folder that does not exist, or is empty")
    folder: Path = parser.parse_args(words).folder
    try:
        if folder.exists() and any(folder.iterdir()):
            raise InputError(f"{folder} is not empty. Choose another folder.")
        shutil.copytree(TEMPLATE, folder, ignore=_LEFT_BEHIND, dirs_exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error}. Choose another folder.") from error
    print(
        f"cd {shlex.quote(str(folder))}\n"
        "lit-mnist --config config.yaml --devices 2 --run-dir runs/first\n"
        "python -m pytest\n"
        "\nREADME.md says more."
    )
