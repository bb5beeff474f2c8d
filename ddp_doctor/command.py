"""The command `doctor`. Its explanations and every rejected flag import no torch."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddp_doctor.checks import describe
from ddp_doctor.flags import FLAGS, SWITCHES
from lit_mnist.distributed.rank import launched_from_outside
from lit_mnist.distributed.signals import STOP
from lit_mnist.distributed.terminal import print_line
from lit_mnist.errors import InputError, nearest

_NUMBERS = {"--devices": int, "--steps": int, "--samples": int, "--timeout": float}


@dataclass
class Request:
    """A parsed command line.

    Attributes:
        target: The target, or empty.
        values: Values by flag.
        args: The words after `--args`.
        command: The words after `--`.
    """

    target: str = ""
    values: dict[str, str] = field(default_factory=dict)
    args: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def number(self, flag: str, default: float) -> float:
        """Returns the value of a flag as a number.

        Raises:
            InputError: It is none.
        """
        text = self.values.get(flag)
        if text is None:
            return default
        try:
            return _NUMBERS[flag](text)
        except ValueError as error:
            kind = "a whole number" if _NUMBERS[flag] is int else "a number"
            raise InputError(f"{flag} must be {kind}, but is {text}.") from error

    def codes(self, flag: str) -> tuple[str, ...]:
        """Returns the codes that a flag names.

        Raises:
            InputError: There is no such check.
        """
        if flag not in self.values:
            return ()
        codes = tuple(_known_code(code.strip()) for code in self.values[flag].split(",") if code.strip())
        if not codes:
            raise InputError(f"{flag} needs a code, such as LD001.")
        return codes


def run_doctor(words: Sequence[str]) -> int:
    """Runs the command, and returns its exit code.

    Raises:
        InputError: The command line or the target is rejected.
        StoppedError: A signal ended the command.
    """
    request = _parse(words)
    if code := request.values.get("--explain"):
        print_line(explain(_known_code(code)))
        return 0
    options = {
        "only": request.codes("--only"),
        "skip": request.codes("--skip"),
        "devices": int(request.number("--devices", 2)),
        "steps": int(request.number("--steps", 3)),
        "samples": int(request.number("--samples", 512)),
        "timeout": request.number("--timeout", 60.0),
    }
    _check(request)
    what = request.target or request.values.get("--config") or shlex.join(request.command)
    print_line(f"The doctor runs {what} several times, with your rights, in {Path.cwd()}. Your files stay as they are.")
    from ddp_doctor.examination import examine
    from ddp_doctor.page import write_page
    from ddp_doctor.terminal import report_text
    from lit_mnist.checkpoint.atomic_io import write_text

    with STOP.record_only():
        report = examine(
            request.target,
            request.values.get("--data"),
            args=request.args,
            config=request.values.get("--config", ""),
            command=request.command,
            keep_output="--keep-output" in request.values,
            **options,  # type: ignore[arg-type]
        )
    print_line(report_text(report, program_of_doctor()))
    try:
        if path := request.values.get("--json"):
            write_text(Path(path), json.dumps(report.to_json(), indent=2) + "\n")
        if path := request.values.get("--html"):
            write_page(Path(path), report)
    except OSError as error:
        raise InputError(f"The report cannot be written: {error}.") from error
    return report.exit_code


def program_of_doctor() -> str:
    """Returns the command as it was started, up to its word `doctor`."""
    script = shutil.which("lit-mnist")
    if Path(sys.argv[0]).name == "lit-mnist":
        on_path = script is not None and Path(script).resolve() == Path(sys.argv[0]).resolve()
        words = ["lit-mnist" if on_path else sys.argv[0]]
    elif "doctor" in sys.orig_argv:
        words = sys.orig_argv[: sys.orig_argv.index("doctor")]
    else:
        words = ["lit-mnist"]
    return shlex.join([*words, "doctor"])


def explain(code: str) -> str:
    """Returns the cause, the fix and the threads of a check."""
    check = describe()[code]
    parts = [f"{code}  {check.title}", "", *textwrap.wrap(check.cause, 100), "", "Fix:"]
    for line in check.fix.splitlines():
        # Lines of code keep their indentation.
        parts += textwrap.wrap(line, 98, initial_indent="  ", subsequent_indent="  ", drop_whitespace=False) or [""]
    return "\n".join([*parts, "", "Reported in:", *(f"  {thread}" for thread in check.threads)])


def _known_code(code: str) -> str:
    known = [*describe(), "structural"]
    for name in known:
        if code.lower() == name.lower():
            return name
    hint = nearest(code.upper(), known) or f": the checks are {known[0]} to {known[-2]}."
    raise InputError(f"There is no check {code}{hint}")


def _parse(words: Sequence[str]) -> Request:
    request, rest = Request(), list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if word == "--":
            request.command, rest = rest, []
        elif flag == "--args":
            request.args, rest = [*([value] if equals else []), *rest], []
        elif not word.startswith("-"):
            if request.target:
                raise InputError(f"The doctor examines one target, but {request.target} and {word} are given.")
            request.target = word
        elif flag not in FLAGS:
            raise InputError(f"Unknown flag {flag}{nearest(flag, FLAGS) or '; see doctor --help.'}")
        elif flag in request.values:
            raise InputError(f"{flag} is given twice.")
        elif flag in SWITCHES:
            if equals:
                raise InputError(f"{flag} takes no value.")
            request.values[flag] = ""
        else:
            if not equals and (not rest or rest[0].startswith("--")):
                raise InputError(f"{flag} needs a value.")
            request.values[flag] = value if equals else rest.pop(0)
    return request


def _check(request: Request) -> None:
    """Raises an InputError for targets and paths that cannot work; nothing was run."""
    if launched_from_outside():
        raise InputError("The doctor starts the ranks: run it without a launcher, or give the command after --.")
    given = [bool(request.target), "--config" in request.values, bool(request.command)]
    if not any(given):
        raise InputError("What should be examined? Name a module or function, --config FILE, or a command after --.")
    if sum(given) > 1:
        raise InputError("Name one of a target, --config and a command after --.")
    for name in (request.target, request.values.get("--data", "")):
        if name and not (":" in name and all(name.rpartition(":")[::2])):
            raise InputError(f"{name} is not a target: write package.module:name or path/to/file.py:name{_meant(name)}")
    if "--data" in request.values and not request.target:
        raise InputError("--data belongs to a LightningModule.")
    if request.args and not request.target:
        raise InputError("--args belongs to a function.")
    path = request.values.get("--config")
    if path and not Path(path).is_file():
        raise InputError(f"There is no file {path}.")
    files = {flag: Path(request.values[flag]).absolute() for flag in ("--json", "--html") if flag in request.values}
    for flag, file in files.items():
        if not file.parent.is_dir():
            raise InputError(f"{flag} {request.values[flag]}: there is no folder {Path(request.values[flag]).parent}.")
        if file.is_dir() or not os.access(file.parent, os.W_OK):
            raise InputError(f"{flag} {request.values[flag]}: the file cannot be written.")
    if len(files) != len(set(files.values())):
        raise InputError("--json and --html name the same file.")


def _meant(name: str) -> str:
    module, dot, attribute = name.rpartition(".")
    if name.endswith(".py"):
        return f", or examine the whole script with -- torchrun --nproc-per-node 2 {name}"
    if Path(name).is_file():
        return ", where file.py is a file of Python."
    return f"; did you mean {module}:{attribute}?" if dot and ":" not in name and attribute.isidentifier() else "."
