"""The command `ddp-doctor`. Its help, its explanations and every rejected flag import no torch."""

import argparse
import shlex
import sys
import textwrap
import traceback
from collections.abc import Sequence
from inspect import signature
from pathlib import Path

from ddp_doctor.accepted import accept_baseline, baseline_text
from ddp_doctor.errors import DoctorError, InputError, StoppedError
from ddp_doctor.faults import load_checks
from ddp_doctor.findings import Report
from ddp_doctor.flags import check_request, parse
from ddp_doctor.output.formats import formatted, read_report
from ddp_doctor.output.page import page_of
from ddp_doctor.output.terminal import print_text
from ddp_doctor.processes import recorded_signals
from ddp_doctor.source.reading import read


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command, and returns its exit code.

    Args:
        argv: The words after the program; by default those of the process.
    """
    words = sys.argv[1:] if argv is None else argv
    try:
        if list(words[:1]) == ["watch"]:
            # It passes signals on to the run.
            from ddp_doctor.watch.command import main as watch

            return watch(words[1:])
        return _run(parse(words))
    except DoctorError as error:
        print_text(str(error) if isinstance(error, StoppedError) else f"error: {error}", sys.stderr)
        return error.exit_code
    except Exception:
        # Exit code 1 says that there is a fault in the examined code.
        traceback.print_exc()
        print_text("error: This is a defect of the doctor, not a fault of the code. Please report it.", sys.stderr)
        return InputError.exit_code


def _run(request: argparse.Namespace) -> int:
    if request.explain:
        print_text(explain(request.explain))
        return 0
    check_request(request)
    if request.write_baseline:
        # What it accepts is written, too.
        request.baseline = ""
    # --json may write to the same file.
    before = read_report(request.before) if request.before else None
    if request.read:
        # It answers without an import of torch.
        report = read(request.read)
        return _finish(accept_baseline(report, request.baseline) if request.baseline else report, request, before)
    what = request.target or shlex.join(request.command)
    # The output of a format is for a program.
    stream = sys.stdout if request.format == "text" else sys.stderr
    about = f"The doctor runs {what} several times, with your permissions, in {Path.cwd()}. Your files do not change."
    print_text(about, stream)
    from ddp_doctor.examination import examine

    options = {name: getattr(request, name) for name in signature(examine).parameters if name != "on_stage"}
    with recorded_signals():
        report = examine(**options, on_stage=lambda name: print_text(f"stage: {name}", stream))
    return _finish(report, request, before)


def _finish(report: Report, request: argparse.Namespace, before: Report | None) -> int:
    """Writes the files that a request names, prints a report, and returns the exit code."""
    try:
        if request.write_baseline and report.exit_code < InputError.exit_code:
            Path(request.write_baseline).write_text(baseline_text(report), encoding="utf-8")
            report = accept_baseline(report, request.write_baseline)
        if request.json:
            Path(request.json).write_text(formatted(report, "json") + "\n", encoding="utf-8")
        if request.html:
            Path(request.html).write_text(page_of(report), encoding="utf-8")
    except OSError as error:
        raise InputError(f"The report cannot be written: {error}.") from error
    finally:
        print_text(formatted(report, request.format, verbose=request.verbose, before=before))
    return report.exit_code


def explain(code: str) -> str:
    """Returns the cause, wrong code, the fix and the threads of a check."""
    check = load_checks()[code]
    parts = {"Wrong": check.WRONG, "Fix": check.FIX, "Reported in": "\n".join(check.THREADS)}
    blocks = [f"{title}:\n{textwrap.indent(text.rstrip(), '  ')}" for title, text in parts.items()]
    return "\n\n".join([f"{code}  {check.TITLE}", check.CAUSE.rstrip(), *blocks])
