"""The flags of `ddp-doctor` and `ddp-doctor watch`, and their help. Imports no torch."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Sequence
from functools import partial
from typing import Any

from ddp_doctor.errors import InputError, nearest
from ddp_doctor.output.formats import FORMATS

SHORT, ALL = "short", "all"
# What the short help leaves to `--help all`.
_RARE = {"--args", "--samples", "--keep-output", "--gpu-as-cpu", "--timeout", "--output", "--write-baseline", "--json"}
_USAGE = """\
ddp-doctor TARGET [--data TARGET] [FLAGS]
       ddp-doctor --config theirs.yaml [FLAGS]
       ddp-doctor [FLAGS] -- COMMAND
       ddp-doctor watch [FLAGS] -- COMMAND"""
_ABOUT = """\
Examines distributed training for silent faults. It runs your code in the current folder, with your permissions, for a
few steps on one process and on several ranks, and compares them. It needs no GPU and no change to the code. The code
sees the files that it writes, but your files stay as they are.

TARGET is package.module:name or path/to/file.py:name: a LightningModule, or a function that runs on each rank without
arguments or with (rank, world_size). COMMAND starts its ranks itself, as torchrun does. `ddp-doctor watch` compares the
ranks of a whole run while it trains."""
_EXIT_CODES = """\
exit codes: 0 no fault; 1 a fault; 2 the input is rejected, or the code fails on one process; 3 a rank hung or was
lost"""


class Parser(argparse.ArgumentParser):
    """A parser whose help fits into the width of the terminal, and whose errors are an `InputError`.

    Args:
        program: Name of the command.
        usage: Its usage.
        about: What it does, as paragraphs.
        exit_codes: Its exit codes.
    """

    def __init__(self, program: str, usage: str, about: str, exit_codes: str) -> None:
        width = width_of_text()
        paragraphs = [textwrap.fill(" ".join(text.split()), width) for text in about.split("\n\n")]
        super().__init__(
            program,
            usage,
            "\n\n".join(paragraphs),
            textwrap.fill(" ".join(exit_codes.split()), width),
            formatter_class=partial(argparse.RawDescriptionHelpFormatter, width=width),
            add_help=False,
            allow_abbrev=False,
        )

    def add_help_flag(self) -> None:
        """Adds `--help`, and `--help all`."""
        text = f"print this help, or with the word {ALL} every option, and exit"
        self.add_argument(
            "-h", "--help", nargs="?", choices=(SHORT, ALL), default="", const=SHORT, metavar=ALL, help=text
        )

    def error(self, message: str) -> None:  # type: ignore[override]
        """Rejects the command line."""
        raise InputError(f"{message[0].upper()}{message[1:]}; see {self.prog} --help.")


def width_of_text() -> int:
    """Returns the width of text, from the terminal or from COLUMNS."""
    return max(40, min(shutil.get_terminal_size((100, 24)).columns, 118))


def names_of(parser: argparse.ArgumentParser) -> list[str]:
    """Returns the long flags in the help of a parser."""
    return list(dict.fromkeys(re.findall(r"--[a-z][a-z-]+", parser.format_help())))


def reject_unknown(words: Sequence[str], known: Sequence[str]) -> None:
    """Rejects the first flag that is not known, with the most similar one.

    Raises:
        InputError: There is such a flag.
    """
    for word in words:
        if word.startswith("-"):
            flag = word.partition("=")[0]
            raise InputError(f"Unknown flag {flag}{nearest(flag, known) or '.'}")


def _add(parser: Parser, everything: bool, name: str, **options: Any) -> None:
    """Adds a flag, which the short help omits if few people need it."""
    if not everything and name in _RARE:
        options["help"] = argparse.SUPPRESS
    parser.add_argument(name, **options)


def flags_of_doctor(*, everything: bool = True) -> argparse.ArgumentParser:
    """Returns the parser of `ddp-doctor`.

    Args:
        everything: Whether its help has all flags, as `--help all`, or those that fit on a screen.
    """
    parser = Parser("ddp-doctor", _USAGE, _ABOUT, _EXIT_CODES)
    add = partial(_add, parser, everything)
    add("target", nargs="?", default="", help=argparse.SUPPRESS)
    add("--data", metavar="TARGET", help="the LightningDataModule; not needed if the module has its own loaders")
    add("--config", metavar="FILE", default="", help="a configuration of LightningCLI that names classes by class_path")
    add("--args", metavar="WORDS", help="further arguments of a function; all words after it")
    add("--devices", metavar="N", type=int, default=2, help="number of ranks (default: 2)")
    add("--steps", metavar="N", type=int, default=3, help="optimizer steps per epoch; two epochs are run (default: 3)")
    samples = "maximum samples of a stream; a data set of up to 20 times as many is evaluated whole (default: 512)"
    add("--samples", metavar="N", type=int, default=512, help=samples)
    only = "codes of checks, separated by commas, or `structural` for those that need no equal numbers"
    add("--only", metavar="CODES", help=only)
    add("--skip", metavar="CODES", help="codes of checks that are not made, or `structural`")
    add("--explain", metavar="CODE", help="print the cause, the fix and the threads of a check, and exit")
    add("--keep-output", action="store_true", help="keep the files that the code writes, in a new folder doctor-output")
    form = "what is printed: text, json, sarif, github (annotations of a workflow) or junit (default: text)"
    add("--format", metavar="NAME", choices=FORMATS, default="text", help=form)
    add("--output", metavar="FILE", help="write the report in this format to a file, and print the text")
    add("--baseline", metavar="FILE", default="", help="accept the findings that a file of --write-baseline holds")
    add("--write-baseline", metavar="FILE", help="write the findings to a file, and accept them")
    gpus = "emulate GPUs on the CPU, or never do (default: if the code needs a GPU and the machine has none)"
    add("--gpu-as-cpu", action=argparse.BooleanOptionalAction, default=None, help=gpus)
    add("--json", metavar="FILE", help="write the report to a file as JSON")
    add("--html", metavar="FILE", help="write the report to a file as an HTML page")
    timeout = "seconds after which a run counts as hung, more on a busy machine (default: 60)"
    add("--timeout", metavar="SECONDS", type=float, default=60.0, help=timeout)
    add("--verbose", action="store_true", help="list every check with its state and its reason")
    add("--version", action="store_true", help="print the version, and exit")
    parser.add_help_flag()
    return parser
