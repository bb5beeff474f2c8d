"""The flags of `ddp-doctor`: of the command line, and of `[tool.ddp-doctor]` in `pyproject.toml`. Imports no torch."""

import argparse
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ddp_doctor.errors import InputError
from ddp_doctor.faults import load_checks
from ddp_doctor.output.formats import FORMATS
from ddp_doctor.versions import VERSION

_USAGE = """\
ddp-doctor TARGET [--data TARGET] [FLAGS]
       ddp-doctor [FLAGS] -- COMMAND
       ddp-doctor --read PATH... [FLAGS]
       ddp-doctor watch [FLAGS] -- COMMAND"""
_ABOUT = """\
Examines distributed training for silent faults. It runs your code in the current folder, with your permissions, for a
few steps on one process and on several ranks, and compares them. It needs no GPU and no change to the code. Your files
stay as they are. TARGET is package.module:name or path/to/file.py:name: a LightningModule, or a function that runs on
each rank without arguments or with (rank, world_size). COMMAND starts its ranks itself, as torchrun does."""
_EXIT_CODES = """\
exit codes: 0 no fault; 1 a fault; 2 the input is rejected, or the code fails on one process and on several ranks; 3 a
rank hung or was lost"""
_SECTION = "ddp-doctor"
# Files are relative to pyproject.toml.
_FILES = {"json", "html", "baseline"}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are an `InputError`."""

    def error(self, message: str) -> NoReturn:
        """Rejects the command line."""
        raise InputError(f"{message}; see {self.prog} --help")


def _parser() -> Parser:
    """Returns the parser of `ddp-doctor`."""
    parser = Parser("ddp-doctor", _USAGE, _ABOUT, _EXIT_CODES, allow_abbrev=False)
    parser.add_argument("target", nargs="?", default="", help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=f"%(prog)s {VERSION}")
    parser.add_argument("--explain", metavar="CODE", type=_code, help="print what a check is about, and exit")
    add = parser.add_argument_group("what is examined").add_argument
    add("--data", metavar="TARGET", default="", help="the LightningDataModule, if the module has no loaders of its own")
    add("--read", metavar="PATH", nargs="+", default=[], help="files and folders that are only read, in seconds")
    arguments = "further arguments of a function; all words after it"
    add("--args", metavar="WORDS", nargs=argparse.REMAINDER, default=[], help=arguments)
    only = "codes of checks, separated by commas, or `structural` for those that need no equal numbers"
    add("--only", metavar="CODES", type=_codes, default=[], help=only)
    add("--skip", metavar="CODES", type=_codes, default=[], help="codes of checks that are not made, or `structural`")
    add = parser.add_argument_group("how it is run").add_argument
    add("--devices", metavar="N", type=int, default=2, help="number of ranks (default: 2)")
    add("--steps", metavar="N", type=int, default=3, help="optimizer steps per epoch; two epochs are run (default: 3)")
    samples = "maximum samples of a stream; a data set of up to 20 times as many is evaluated whole (default: 512)"
    add("--samples", metavar="N", type=int, default=512, help=samples)
    timeout = "seconds after which a run counts as hung, more on a busy machine (default: 60)"
    add("--timeout", metavar="SECONDS", type=float, default=60.0, help=timeout)
    gpus = "emulate GPUs on the CPU, or never do (default: if the code needs a GPU and the machine has none)"
    add("--gpu-as-cpu", action=argparse.BooleanOptionalAction, default=None, help=gpus)
    add = parser.add_argument_group("the report").add_argument
    add("--format", metavar="NAME", choices=FORMATS, default="text", help=f"what is printed: {', '.join(FORMATS)}")
    before = "a report of --json before a change, with which --format markdown compares"
    add("--before", metavar="FILE", default="", help=before)
    add("--json", metavar="FILE", default="", help="write the report to a file as JSON")
    add("--html", metavar="FILE", default="", help="write the report to a file as an HTML page")
    add("--verbose", action="store_true", help="list every check with its state and its reason")
    add("--baseline", metavar="FILE", default="", help="accept the findings that a file of --write-baseline holds")
    add("--write-baseline", metavar="FILE", default="", help="write the findings to a file, and accept them")
    return parser


def _code(text: str) -> str:
    code = text.strip().upper()
    if code not in load_checks():
        raise argparse.ArgumentTypeError(f"there is no check {text.strip()}: they are LD001 to {max(load_checks())}")
    return code


def _codes(text: str) -> list[str]:
    return ["structural" if part.strip().lower() == "structural" else _code(part) for part in text.split(",")]


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Returns the values of all flags, `target`, `args` and `command`.

    Raises:
        InputError: A flag is unknown, or its value is wrong.
    """
    end = words.index("--") if "--" in words else len(words)
    parser = _parser()
    where, settings = _settings()
    try:
        defaults = parser.parse_args(settings)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    request = parser.parse_args(words[:end], defaults)
    # What follows belongs to the examined code.
    request.command = list(words[end + 1 :])
    return request


def check_request(request: argparse.Namespace) -> None:
    """Raises an InputError for targets and paths that cannot work; nothing was run."""
    if "LOCAL_RANK" in os.environ:
        raise InputError("The doctor starts the ranks: run it without a launcher, or give the command after --.")
    if sum(map(bool, (request.target, request.command, request.read))) != 1:
        raise InputError("What should be examined? Name one of a target, --read PATH, and a command after --.")
    for name in filter(None, (request.target, request.data)):
        if not all(name.rpartition(":")[::2]):
            raise InputError(
                f"{name} is not a target: write package.module:name or path/to/file.py:name, or give a command after "
                "--, such as: ddp-doctor -- torchrun --nproc-per-node 2 train.py"
            )
    if (request.data or request.args) and not request.target:
        raise InputError("--data and --args belong to a LightningModule or a function.")
    if request.before and request.format != "markdown":
        raise InputError("--before belongs to --format markdown.")
    for name in ("json", "html", "write_baseline"):
        path = getattr(request, name)
        # Otherwise, the report would be lost after minutes.
        if path and (Path(path).is_dir() or not os.access(Path(path).parent, os.W_OK)):
            raise InputError(f"--{name.replace('_', '-')} {path}: this file cannot be written.")


def _settings() -> tuple[str, list[str]]:
    """Returns the nearest `pyproject.toml` that has the section, and its keys as words of a command line."""
    for path in (folder / "pyproject.toml" for folder in (Path.cwd(), *Path.cwd().parents)):
        if path.is_file():
            try:
                section = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get(_SECTION)
            except (OSError, ValueError) as error:
                raise InputError(f"{path} cannot be read: {error}.") from error
            if section is not None:
                words = [word for key, value in section.items() for word in _words(path.parent, key, value)]
                return f"[tool.{_SECTION}] of {path}", words
    return "", []


def _words(folder: Path, key: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        # Only `gpu-as-cpu` has a third state.
        return [f"--{key}"] if value else ["--no-gpu-as-cpu"] if key == "gpu-as-cpu" else []
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return [f"--{key}={folder / text if key in _FILES else text}"]
