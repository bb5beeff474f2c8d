"""The public programs of the corpus, and their folders: a copy of each checkout, with the data that it wants."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from data_recipes import RECIPES

HERE = Path(__file__).parent
STAND_INS = HERE / "stand_ins"


@dataclass(frozen=True)
class Program:
    """A public program.

    Attributes:
        name: Short name.
        repository: Its repository on GitHub, as OWNER/NAME.
        commit: The commit that was examined.
        command: What starts it, in the shell's words.
        folder: The folder of the repository in which the command runs.
        data: Recipes by path: what was generated for it.
        needs: What was needed, in words.
        options: Options of the doctor.
        environment: Environment variables; `{root}` is its folder.
        gpu: Whether it wants GPUs, which are emulated.
        stand_ins: Whether names that libraries have removed are restored.
        packages: Packages that it imports beyond those of this project.
        isolated: Packages of versions of their own, as requirements.
        faults: Codes of the faults that are expected.
        judgement: For each fault that is reported, whether it is one, and why.
        not_compared: Why the comparison with one process is not expected; empty if it is.
    """

    name: str
    repository: str
    commit: str
    command: str
    folder: str = ""
    data: dict[str, dict[str, Any]] = field(default_factory=dict)
    needs: str = ""
    options: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    gpu: bool = True
    stand_ins: bool = False
    packages: tuple[str, ...] = ()
    isolated: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    judgement: dict[str, str] = field(default_factory=dict)
    not_compared: str = ""


def load() -> list[Program]:
    """Returns the programs of programs.yaml."""
    content = yaml.safe_load((HERE / "programs.yaml").read_text())
    programs = []
    for line in content["programs"]:
        lists = {key: tuple(line[key]) for key in ("packages", "isolated", "faults") if key in line}
        programs.append(Program(**{**line, **lists}, commit=content["commits"][line["repository"]]))
    return programs


def check_out(program: Program, checkouts: Path, *, download: bool) -> Path:
    """Returns the folder of a program's repository, which is cloned if it is not there.

    Args:
        program: The program.
        checkouts: Folder of the checkouts, each named OWNER+NAME.
        download: Whether a missing one is cloned.
    """
    folder = checkouts / program.repository.replace("/", "+")
    if not folder.exists():
        if not download:
            raise FileNotFoundError(f"There is no checkout {folder}.")
        _git("init", "--quiet", folder)
        _git("-C", folder, "fetch", "--quiet", "--depth=1", f"https://github.com/{program.repository}", program.commit)
        _git("-C", folder, "checkout", "--quiet", "FETCH_HEAD")
    return folder


def prepare(program: Program, checkout: Path, place: Path) -> Path:
    """Copies a checkout to a place, builds the data there, and returns the folder in which the command runs."""
    shutil.rmtree(place, ignore_errors=True)
    skipped = shutil.ignore_patterns(".git", "*.gif", "*.mp4", "*.ipynb")
    shutil.copytree(checkout, place, symlinks=True, ignore=skipped)
    folder = place / program.folder
    for path, recipe in program.data.items():
        for name, arguments in recipe.items():
            RECIPES[name](folder / path, **(arguments or {}))
    return folder


def _git(*words: object) -> None:
    subprocess.run(["git", *map(str, words)], check=True, timeout=600)
