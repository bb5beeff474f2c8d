"""Examines the planted faults, TrainCheck's errors and the healthy projects; writes the table of benchmark/suite.md.

python tests/suite.py             all, one on each processor, which takes more than an hour on two
python tests/suite.py ld013 gan   those whose names contain a word; the results of the others are kept
python tests/suite.py --show NAME the text of a program
python tests/suite.py --checks    the table of checks in docs/guide.md only; nothing is examined

On a busy machine, DOCTOR_TIMEOUT gives the runs of an examination more seconds than 60.
"""

import os
import random
import sys
import tempfile
import time
from contextlib import chdir
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

from projects.cases import CASES, FAMILIES, TRAINCHECK, Case

from ddp_doctor.evidence.derivative import measure
from ddp_doctor.examination import _Examination, examine
from ddp_doctor.faults import is_structural, load_checks
from ddp_doctor.findings import Report, Verdict

ROOT = Path(__file__).parents[1]
TIMEOUT = float(os.environ.get("DOCTOR_TIMEOUT", "60"))
GUIDE, PAGE = ROOT / "docs" / "guide.md", ROOT / "benchmark" / "suite.md"
BEGIN, END = "<!-- suite -->\n", "<!-- end of suite -->\n"
_DEMOS = "lightning.pytorch.demos"
_BORING = f"{_DEMOS}.boring_classes:BoringModel"
_MODULES = "boring_classes:BoringModel boring_classes:ManualOptimBoringModel lstm:LightningLSTM"
INSTALLED = (
    *(
        Case(f"{_DEMOS}.{name}", "module of Lightning's demos", target=f"{_DEMOS}.{name}")
        for name in (*_MODULES.split(), "transformer:LightningTransformer")
    ),
    *(
        Case(f"BoringModel with {name}", "Lightning's demos", target=_BORING, data=f"{_DEMOS}.boring_classes:{name}")
        for name in ("BoringDataModule", "BoringDataModuleNoLen")
    ),
)
EVERYTHING = (*CASES, *(case for cases in FAMILIES.values() for case in cases), *TRAINCHECK, *INSTALLED)


@dataclass(frozen=True)
class Result:
    """What the doctor said of a project."""

    case: Case
    report: Report
    # The gradient that the ranks apply, divided by the derivative of what they compute; empty if unknown.
    quotient: str = ""

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
    file = f"{case.path}:" if case.text else ""
    what: dict[str, Any] = {"target": f"{file}{case.target}", "data": case.data and f"{file}{case.data}"}
    if case.command:
        what = {"command": (str(Path(sys.executable).parent / case.words[0]), *case.words[1:])}
    quotients, finish = [""], _Examination.finish

    def measured(examination: _Examination) -> None:
        finish(examination)
        if examination.evidence.worked("ranks") and (found := measure(examination.evidence)):
            quotients.append(f"{found[0]:.6f}")

    with tempfile.TemporaryDirectory() as folder, chdir(folder), mock.patch.object(_Examination, "finish", measured):
        # Two of Lightning's demos download this text unless it is here.
        words = random.Random(0)
        Path("data").mkdir()
        text = "\n".join(" ".join(f"w{words.randrange(100)}" for _ in range(20)) for _ in range(300))
        Path("data/wikitext-2.txt").write_text(text)
        return Result(case, examine(**what, timeout=TIMEOUT), quotients[-1])


def main(words: list[str]) -> int:
    """Examines the projects, and returns the exit code: 1 if a report was not as expected, 2 if there is no project."""
    wanted = [case for case in EVERYTHING if not words or any(word in case.name for word in words)]
    if not wanted:
        print(f"no program has a name that contains {' or '.join(words)}", file=sys.stderr)
        return 2
    wrong = 0
    with get_context("spawn").Pool(maxtasksperchild=1) as pool:
        for result in pool.imap_unordered(examine_case, wanted):
            wrong += not result.is_right
            rows = rows_of_page() | {result.case.name: _row(result)}
            PAGE.write_text(page_with(rows))
            print(rows[result.case.name], flush=True)
            if not result.is_right:
                print(*result.report.findings, result.report.error, result.report.hang, sep="\n", flush=True)
    return int(wrong > 0)


def rows_of_page() -> dict[str, str]:
    """Returns the row of each program that the page lists, by its name."""
    lines = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].splitlines()
    return {line.split(" | ")[0][2:]: line for line in lines if line.startswith("| ") and line[-3:-2].isdigit()}


def _row(result: Result) -> str:
    case = result.case
    verdict = "" if case.verdict == Verdict.FAULT or not result.codes else f" ({case.verdict})"
    found = f"{', '.join(result.codes) or 'no fault'}{verdict}{'' if result.is_right else ', not as expected'}"
    measured = f"{result.quotient} | {result.report.seconds:.0f} | {time.strftime('%Y-%m-%d')}"
    return f"| {case.name} | {case.note} | {found} | {measured} |"


def page_with(rows: dict[str, str]) -> str:
    """Returns the page with these rows."""
    kinds = {
        "all with a finding": [case for case in EVERYTHING if case.codes],
        "all without": [case for case in EVERYTHING if not case.codes],
        "planted faults": [case for case in CASES if case.codes],
        "healthy projects": [case for case in CASES if not case.codes],
        **FAMILIES,
        "errors of TrainCheck's list": TRAINCHECK,
        "programs of installed packages": INSTALLED,
    }
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning", "transformers", "accelerate"))
    days = sorted(row.split()[-2] for row in rows.values())
    lines = [f"Seen from {days[0]} to {days[-1]}, on CPUs, with {libraries}.", ""]
    for kind, cases in kinds.items():
        right = sum("not as expected" not in rows[case.name] for case in cases if case.name in rows)
        lines.append(f"- {kind}: {right} of {len(cases)} as expected")
    lines += ["", "| project | what it is | found | quotient | seconds | seen |", "|---|---|---|--:|--:|---|"]
    lines += [rows.get(case.name, f"| {case.name} | {case.note} | not examined | | | |") for case in EVERYTHING]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}{chr(10).join(lines)}\n{END}{rest.partition(END)[2]}"


def checks_table() -> str:
    """Returns the table of all checks for the guide."""
    lines = ["| code | finds | structural | reported in |", "|---|---|---|---|"]
    for code, check in load_checks().items():
        structural = "yes" if is_structural(check) else ""
        link = f"[{code}](../ddp_doctor/faults/{Path(str(check.__file__)).name})"
        lines.append(f"| {link} | {check.TITLE} | {structural} | {', '.join(check.THREADS)} |")
    return "\n".join(lines) + "\n"


def write_checks() -> None:
    """Writes the table of all checks into the guide."""
    before, _, rest = GUIDE.read_text().partition("<!-- checks -->\n")
    after = rest.partition("<!-- end of checks -->\n")[2]
    GUIDE.write_text(f"{before}<!-- checks -->\n{checks_table()}<!-- end of checks -->\n{after}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--show"]:
        sys.exit(next((case.text for case in EVERYTHING if case.name == sys.argv[2]), "there is no such program"))
    write_checks()
    sys.exit(0 if sys.argv[1:] == ["--checks"] else main(sys.argv[1:]))
