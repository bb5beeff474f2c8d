"""Examines the planted faults, TrainCheck's errors and the healthy projects, and writes the table of docs/doctor.md.

python tests/doctor/suite.py             all, which takes about half an hour on two cores
python tests/doctor/suite.py ld013 gan   the projects whose names contain a word; the page stays
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from projects.cases import CASES, PROJECTS, Case
from projects.traincheck import EXPECTED

from lit_mnist.doctor.findings import Report, Verdict

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"
BEGIN, END = "<!-- suite -->\n", "<!-- end of suite -->\n"
TRAINCHECK = tuple(
    Case(name, "traincheck.py", name, codes=(code,), note="TrainCheck") for name, code in EXPECTED.items()
)


@dataclass(frozen=True)
class Result:
    """What the doctor said of a project.

    Attributes:
        case: The project with the expected codes.
        report: The report.
    """

    case: Case
    report: Report

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes with the expected verdict."""
        return tuple(sorted({f.code for f in self.report.findings if f.verdict.value == self.case.verdict}))

    @property
    def is_right(self) -> bool:
        """Whether exactly the expected codes have the expected verdict, and no other is a fault."""
        others = {finding.code for finding in self.report.of(Verdict.FAULT)} - set(self.case.codes)
        return self.codes == self.case.codes and not others and not self.report.error


def examine_case(case: Case) -> Result:
    """Examines a project in an empty current folder, since some write files."""
    from lit_mnist.doctor import examine

    with _empty_folder():
        if case.command:
            words = (str(Path(sys.executable).parent / case.words[0]), *case.words[1:])
            return Result(case, examine(command=words, devices=case.devices))
        data = f"{case.path}:{case.data}" if case.data else None
        return Result(case, examine(f"{case.path}:{case.target}", data, devices=case.devices))


@contextmanager
def _empty_folder() -> Iterator[None]:
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def main(words: list[str]) -> int:
    """Examines the projects, and returns the number of those with an unexpected report."""
    wanted = [case for case in (*CASES, *TRAINCHECK) if not words or any(word in case.name for word in words)]
    results = []
    for case in wanted:
        result = examine_case(case)
        results.append(result)
        expected = ", ".join(case.codes) or "none"
        found = ", ".join(f"{finding.code} {finding.verdict.value}" for finding in result.report.faults) or "no fault"
        mark = "as expected" if result.is_right else f"NOT AS EXPECTED ({expected})"
        print(f"{case.name}: {', '.join(result.codes) or found}, {mark}, {result.report.seconds:.0f} s", flush=True)
    if not words:
        _write(results)
    return sum(not result.is_right for result in results)


def _write(results: list[Result]) -> None:
    kinds = {
        "planted faults": [result for result in results if result.case.codes and result.case not in TRAINCHECK],
        "errors of TrainCheck's list": [result for result in results if result.case in TRAINCHECK],
        "healthy projects": [result for result in results if not result.case.codes],
    }
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning", "transformers", "accelerate"))
    lines = [f"Seen on {time.strftime('%Y-%m-%d')}, on CPUs, with {libraries}.", ""]
    for kind, group in kinds.items():
        lines.append(f"- {kind}: {sum(result.is_right for result in group)} of {len(group)} as expected")
    lines += ["", "| project | fault, or what it shows | found | s |", "|---|---|---|---|"]
    for result in results:
        found = ", ".join(result.codes) or "none"
        mark = "" if result.is_right else " (not as expected)"
        seconds = f"{result.report.seconds:.0f}"
        name = result.case.name if result.case in TRAINCHECK else result.case.path.relative_to(PROJECTS).with_suffix("")
        lines.append(f"| {name} | {result.case.note} | {found}{mark} | {seconds} |")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{chr(10).join(lines)}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
