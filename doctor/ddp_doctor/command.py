"""The command `ddp-doctor`. Its help, its explanations and every rejected flag import no torch."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
import textwrap
import traceback
from collections.abc import Sequence
from pathlib import Path

from ddp_doctor.accepted import accept_baseline, baseline_text
from ddp_doctor.errors import DoctorError, InputError, StoppedError, nearest
from ddp_doctor.faults import describe
from ddp_doctor.findings import Report
from ddp_doctor.flags import ALL, flags_of_doctor, names_of, reject_unknown, width_of_text
from ddp_doctor.output.formats import FORMATS, formatted
from ddp_doctor.output.links import page_address
from ddp_doctor.output.progress import shown_progress
from ddp_doctor.output.terminal import print_text
from ddp_doctor.request import PROGRAMS, check_request
from ddp_doctor.settings import read_settings
from ddp_doctor.stop import recorded_signals
from ddp_doctor.versions import VERSION


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command, and returns its exit code.

    Args:
        argv: The words after the program; by default those of the process.
    """
    try:
        words = sys.argv[1:] if argv is None else argv
        if words and words[0] == "--complete":
            for word in complete(*_typed_words()):
                print_text(word)
            return 0
        if words and words[0] == "watch":
            # It passes signals on to the run.
            from ddp_doctor.watch.command import main as watch

            return watch(words[1:])
        with recorded_signals():
            return _run(words)
    except DoctorError as error:
        print_text(str(error) if isinstance(error, StoppedError) else f"error: {error}", sys.stderr)
        return error.exit_code
    except Exception:
        # Exit code 1 says that there is a fault in the examined code.
        traceback.print_exc()
        print_text("error: This is a defect of the doctor, not a fault of the code. Please report it.", sys.stderr)
        return InputError.exit_code


def complete(words: Sequence[str], current: str) -> list[str]:
    """Returns the words that can follow in a command line, for the shell; without one, it completes names of files.

    Args:
        words: The words before the cursor, without the program.
        current: The beginning of the word at the cursor.
    """
    if "--" in words:
        return []
    codes = [*describe(), "structural"]
    values = {"--explain": codes, "--only": codes, "--skip": codes, "--format": list(FORMATS), "--help": [ALL]}
    known = values.get(words[-1], []) if words else ["watch"]
    if current.startswith("-"):
        watch = words[:1] == ["watch"]
        known = ["--every", "--records", "--help"] if watch else names_of(flags_of_doctor())
    return [each for each in known if each.startswith(current)]


def _typed_words() -> tuple[list[str], str]:
    """Returns the words before the cursor and the beginning of the word at it, as bash passes them."""
    line = os.environ.get("COMP_LINE", "")
    before = line[: int(os.environ.get("COMP_POINT") or len(line))]
    words = before.split()
    current = "" if not words or before[-1].isspace() else words.pop()
    return words[1:], current


def _run(words: Sequence[str]) -> int:
    request = parse(words)
    if request.help:
        print_text(flags_of_doctor(everything=request.help == ALL).format_help().rstrip())
        return 0
    if request.version:
        print_text(f"ddp-doctor {VERSION}")
        return 0
    if request.explain:
        print_text(explain(_known_code(request.explain)))
        return 0
    if request.target and ":" not in request.target and (hint := nearest(request.target, ["watch"])):
        raise InputError(f"Unknown command {request.target}{hint}")
    only, skip = ([_known_code(code) for code in _codes(request, flag)] for flag in ("only", "skip"))
    check_request(request)
    what = request.target or request.config or shlex.join(request.command)
    # The output of a format is for a program.
    own = request.format != "text" and not request.output
    begun = f"The doctor runs {what} several times, with your permissions, in {Path.cwd()}. Your files do not change."
    stream = sys.stderr if own else sys.stdout
    print_text(begun, stream)
    from ddp_doctor.examination import examine

    names = ("devices", "steps", "samples", "timeout", "args", "config", "command", "keep_output")
    options = {name: getattr(request, name) for name in (*names, "baseline", "gpu_as_cpu")}
    with shown_progress(stream) as progress:
        report = examine(request.target, request.data, only=only, skip=skip, on_stage=progress.begin, **options)
    if request.write_baseline and report.exit_code < 2:
        write_text(Path(request.write_baseline), baseline_text(report))
        report = accept_baseline(report, request.write_baseline)
    print_text(formatted(report, request.format if own else "text", program(), verbose=request.verbose))
    try:
        _write(report, request)
    except OSError as error:
        raise InputError(f"The report cannot be written: {error}.") from error
    return report.exit_code


def _write(report: Report, request: argparse.Namespace) -> None:
    """Writes the files that a request names."""
    if request.output:
        write_text(Path(request.output), formatted(report, request.format, program(), verbose=request.verbose) + "\n")
    if request.json:
        write_text(Path(request.json), formatted(report, "json") + "\n")
    if request.html:
        from ddp_doctor.output.page import page_of

        write_text(Path(request.html), page_of(report))


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Returns the values of all flags, `target`, `args` and `command`.

    Raises:
        InputError: A flag is unknown, or its value is wrong.
    """
    marks = (place for place, word in enumerate(words) if word == "--" or word.partition("=")[0] == "--args")
    end = next(marks, len(words))
    # What follows belongs to the examined code.
    own, rest = list(words[:end]), list(words[end:])
    place = next((place for place, word in enumerate(own) if Path(word).name in PROGRAMS), None)
    if place is not None and not rest:
        raise InputError(f"A command follows --: ddp-doctor {shlex.join([*own[:place], '--', *own[place:]])}")
    parser = flags_of_doctor()
    known = names_of(parser)
    request, unknown = parser.parse_known_args(own, _defaults(parser, known))
    flags = [word.partition("=")[0] for word in own if word.startswith("--")]
    for word in unknown:
        if not word.startswith("-"):
            raise InputError(f"The doctor examines one target, but {request.target} and {word} are given.")
        reject_unknown([word], known)
    if twice := [flag for flag in flags if flags.count(flag) > 1]:
        raise InputError(f"{twice[0]} is given twice.")
    mark = rest[0] if rest else ""
    request.command = rest[1:] if mark == "--" else []
    request.args = [*mark.split("=", 1)[1:], *rest[1:]] if mark not in {"", "--"} else []
    return request


def _defaults(parser: argparse.ArgumentParser, flags: Sequence[str]) -> argparse.Namespace:
    """Returns the values that `pyproject.toml` gives."""
    where, words = read_settings(flags)
    try:
        return parser.parse_args(words)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def program() -> str:
    """Returns the command as it can be pasted."""
    started = Path(sys.argv[0])
    elsewhere = started.name == "ddp-doctor" and shutil.which("ddp-doctor") is None
    return shlex.quote(str(started)) if elsewhere else "ddp-doctor"


def explain(code: str) -> str:
    """Returns the cause, wrong code, the fix, the threads and the page of a check."""
    check = describe()[code]
    parts = [f"{code}  {check.title}", "", *textwrap.wrap(check.cause, width_of_text()), ""]
    parts += ["Wrong:", *(f"  {line}" for line in check.wrong.splitlines()), "", "Fix:"]
    for line in check.fix.splitlines():
        # Lines of code keep their indentation.
        parts += textwrap.wrap(
            line, width_of_text(), initial_indent="  ", subsequent_indent="  ", drop_whitespace=False
        ) or [""]
    parts += ["", "Reported in:", *(f"  {thread}" for thread in check.threads)]
    page = page_address(code)
    return "\n".join([*parts, *(["", f"page      {page}"] if page else [])])


def write_text(path: Path, text: str) -> None:
    """Writes a file atomically.

    Raises:
        OSError: It cannot be written; an old file stays as it is.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _codes(request: argparse.Namespace, flag: str) -> list[str]:
    text = getattr(request, flag)
    codes = [code.strip() for code in (text or "").split(",") if code.strip()]
    if text is not None and not codes:
        raise InputError(f"--{flag} needs a code, such as LD001.")
    return codes


def _known_code(code: str) -> str:
    known = [*describe(), "structural"]
    for name in known:
        if code.lower() == name.lower():
            return name
    # A number that is similar to another one means nothing.
    similar = "" if re.fullmatch(r"(LD)?\d+", code, re.IGNORECASE) else nearest(code.lower(), ["structural"])
    hint = similar or f": the checks are {known[0]} to {known[-2]}, and structural names a group; commas separate them."
    raise InputError(f"There is no check {code}{hint}")
