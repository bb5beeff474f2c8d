"""Examines public programs, unchanged, and writes the table of corpus.md. README.md says how it is run."""

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import recipes
import yaml

HERE = Path(__file__).parent
ROOT, STAND_INS = HERE.parent, HERE / "stand_ins"
PAGE, WORK = HERE / "corpus.md", ROOT / "build" / "corpus"
BEGIN, END = "<!-- corpus -->\n", "<!-- end of corpus -->\n"
_FALSE = "**false fault**"
# Seconds for an examination, and for a run of it.
LIMIT, HUNG = 1800, 200
DEFAULTS: dict[str, Any] = {"folder": "", "data": {}, "needs": "", "environment": {}, "gpu": True, "stand_ins": False}
DEFAULTS |= {"packages": [], "isolated": [], "faults": {}, "not_compared": ""}
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false"}


class Program(SimpleNamespace):
    """A program of programs.yaml, which says what its attributes mean."""


def load() -> list[Program]:
    """Returns the programs of programs.yaml."""
    content = yaml.safe_load((HERE / "programs.yaml").read_text())
    return [Program(**DEFAULTS | one, commit=content["commits"][one["repository"]]) for one in content["programs"]]


def main() -> int:
    """Runs the command, and returns 1 if a program was judged otherwise than expected."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="words, of which a program's name contains one")
    parser.add_argument("--checkouts", type=Path, default=WORK / "checkouts", help="folder of the repositories")
    request = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    for program in load():
        if not request.names or any(word in program.name for word in request.names):
            try:
                result = examine(program, request.checkouts.absolute())
            except (OSError, ImportError, subprocess.SubprocessError) as error:
                # Its repository or a package cannot be had: the others can be examined.
                print(f"{program.name}: not examined: {type(error).__name__}: {error}", flush=True)
            else:
                print(f"{program.name}: {result['seconds']} s, faults {result['faults']}", flush=True)
                write_table(rows_of_page() | {program.name: row(program, result)})
    wrong = [name for name, line in rows_of_page().items() if _FALSE in line]
    print(f"faults that were not expected: {', '.join(wrong) or 'none'}")
    return bool(wrong)


def examine(program: Program, checkouts: Path) -> dict[str, Any]:
    """Returns what the table needs of the report on a program."""
    if missing := [name for name in program.packages if find_spec(name) is None]:
        raise ImportError(f"{', '.join(missing)} is not installed")
    place = WORK / "programs" / program.name
    folder = prepare(program, check_out(program, checkouts), place)
    report, log = WORK / f"{program.name}.json", WORK / f"{program.name}.txt"
    report.unlink(missing_ok=True)
    words = [sys.executable, "-m", "ddp_doctor", "--json", str(report), "--timeout", str(HUNG), "--samples", "64"]
    words += [*["--gpu-as-cpu"] * program.gpu, "--", *shlex.split(program.command)]
    paths = [*map(installed, program.isolated), *[STAND_INS] * program.stand_ins, ROOT]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    environment |= {key: value.format(root=place) for key, value in program.environment.items()}
    begun = time.monotonic()
    # The doctor ends what it has started when it is terminated.
    words = ["timeout", "--kill-after=30", str(LIMIT), *words]
    with log.open("w") as output:
        subprocess.run(words, cwd=folder, env=environment, stdout=output, stderr=output, check=False)
    git = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=7", "--exclude=*", "--dirty=*"]
    doctor = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    told: dict[str, Any] = {"error": log.read_text(), "hang": False, "findings": [], "comparison": None}
    told |= json.loads(report.read_text()) if report.exists() else {}
    comparison = told["comparison"] or {}
    return {
        "faults": sorted({one["code"] for one in told["findings"] if one["verdict"] == "fault"}),
        "others": sorted({f"{one['code']} {one['verdict']}" for one in told["findings"] if one["verdict"] != "fault"}),
        "compared": comparison.get("method") or "yes" if comparison.get("made") else "",
        "why": comparison.get("reason", ""),
        "error": told["error"][-600:],
        "hang": bool(told["hang"]),
        "doctor": doctor,
        "seconds": round(time.monotonic() - begun),
    }


def check_out(program: Program, checkouts: Path) -> Path:
    """Returns the folder of a program's repository, which is cloned if it is not there."""
    folder = checkouts / program.repository.replace("/", "+")
    if not folder.exists():
        address = f"https://github.com/{program.repository}"
        for words in (
            ["init", "--quiet", str(folder)],
            ["-C", str(folder), "fetch", "--quiet", "--depth=1", address, program.commit],
            ["-C", str(folder), "checkout", "--quiet", "FETCH_HEAD"],
        ):
            subprocess.run(["git", *words], check=True, timeout=600)
    return folder


def prepare(program: Program, checkout: Path, place: Path) -> Path:
    """Copies a checkout to a place, builds the data there, and returns the folder in which the command runs."""
    shutil.rmtree(place, ignore_errors=True)
    skipped = shutil.ignore_patterns(".git", "*.gif", "*.mp4", "*.ipynb")
    shutil.copytree(checkout, place, symlinks=True, ignore=skipped)
    for path, recipe in program.data.items():
        for name, arguments in recipe.items():
            getattr(recipes, name)(place / program.folder / path, **(arguments or {}))
    return place / program.folder


def installed(requirement: str) -> Path:
    """Returns the folder of a package in a version of its own, which is installed once."""
    folder = WORK / "packages" / requirement.replace("==", "-")
    if not folder.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), requirement]
        subprocess.run(pip, check=True, timeout=300)
    return folder


def rows_of_page() -> dict[str, str]:
    """Returns the row of each program that the page lists, by its name."""
    lines = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].splitlines()
    return {line[3:].partition("]")[0]: line for line in lines if line.startswith("| [")}


def write_table(rows: dict[str, str]) -> None:
    """Writes these rows into the page, with what a person has found of their faults."""
    programs = [program for program in load() if program.name in rows]
    lines = [rows[program.name] for program in programs]
    cells = [line.split(" | ") for line in lines]
    ended = [row for row in cells if row[3] not in {"not examined", "hung"}]
    seconds = [int(row[5]) for row in ended]
    head = ["", f"Programs: {len(lines)}. Examined to the end: {len(ended)}."]
    head += [f"Compared with one process: {sum(not row[4].startswith('no: ') for row in ended)}."]
    head += [f"Programs with a false fault: {sum(_FALSE in line for line in lines)}."]
    head += [f"Seconds per program: median {statistics.median(seconds):.0f}, most {max(seconds):.0f}.", ""]
    head += ["| program | command | needed | verdict | compared with one process | s | doctor |"]
    found = [
        f"- **{program.name}, {code}**: {why}"
        for program, row in zip(programs, cells, strict=True)
        for code, why in program.faults.items()
        if f"{code} fault" in row[3]
    ]
    lines = [*head, "|---|---|---|---|---|---:|---|", *lines, "", *found]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text("".join([before, BEGIN, "\n".join(lines), "\n", END, rest.partition(END)[2]]))


def row(program: Program, result: dict[str, Any]) -> str:
    """Returns the line of the table."""
    address = f"https://github.com/{program.repository}/tree/{program.commit}/{program.folder}".rstrip("/")
    words = [f"{code} {'fault' if code in program.faults else _FALSE}" for code in result["faults"]]
    words += [other for other in result["others"] if other.endswith(("devices", "unclear", "note"))]
    verdict = "not examined" if result["error"] else ", ".join(words) or ("hung" if result["hang"] else "no fault")
    why = result["error"].strip().rpartition("\n")[2] or program.not_compared or result["why"]
    cells = [f"[{program.name}]({address}) `{program.commit[:7]}`", f"`{program.command}`", program.needs or "nothing"]
    cells += [verdict, result["compared"] or f"no: {why}", str(result["seconds"])]
    cells.append(f"`{result['doctor']}`" if result["doctor"] else "")
    return f"| {' | '.join(cell.replace('|', ',') for cell in cells)} |"


if __name__ == "__main__":
    sys.exit(main())
