"""Probe of the options with which a program resumes, and their use after a restart."""

import argparse
import json
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_doctor.probes.wrap import wrap
from ddp_doctor.records.recorder import is_called_near_user
from ddp_doctor.records.spec import Spec

# A file in the folder of a run: the options of the program that resume, each with what it takes.
OPTIONS = "options.json"
NOTHING, FILE, FOLDER = "nothing", "file", "folder"
_RESUMES = re.compile(
    r"--?(auto[-_])?(resume|restore|continue|cont)"
    r"([-_](from|training|run|path|file|dir|folder|ckpt|checkpoint|snapshot))*"
)
_TAKES_FOLDER = re.compile(r"dir|folder|run")


def watch_options(folder: Path, spec: Spec) -> None:
    """Records the options that resume, of parsers of `argparse`, and adds one of them to the command.

    Args:
        folder: Folder of the run.
        spec: The run; its intervention `resume_by` is an option with the path of a checkpoint, if it takes one.
    """
    words = list(spec.interventions.get("resume_by", ()))

    def on_action(original: Any, action: argparse.Action, *args: Any, **kwargs: Any) -> None:
        original(action, *args, **kwargs)
        option = next((text for text in action.option_strings if _RESUMES.fullmatch(text)), "")
        given = any(word.partition("=")[0] in action.option_strings for word in sys.argv)
        kind = _takes(action, option)
        if not option or not kind or given or action.default or not is_called_near_user(8):
            return
        if words[:1] == [option]:
            # The program parses its command after this.
            sys.argv += [option, *map(_existing, words[1:])]
        with suppress(FileExistsError), (folder / OPTIONS).open("x") as file:
            json.dump([option, kind], file)

    wrap(argparse.Action, "__init__", on_action)


def _takes(action: argparse.Action, option: str) -> str:
    """Returns what an option takes; nothing that is known if it takes a number or one of several words."""
    if action.nargs == 0:
        return NOTHING
    if action.choices or action.type not in {None, str, Path} or action.nargs not in {None, "?"}:
        return ""
    return FOLDER if _TAKES_FOLDER.search(option) else FILE


def _existing(path: str) -> str:
    """Returns a path, or the newest file of its folder if it was renamed."""
    others = [] if Path(path).exists() else Path(path).parent.glob("*")
    return str(max(others, key=lambda other: other.stat().st_mtime, default=path))
