"""Examines public programs, unchanged, and writes the table of docs/corpus.md.

python tests/corpus/corpus.py                    all; clones each repository, which needs a network
python tests/corpus/corpus.py mnist imagenet     by names, or words in them; other results are kept
python tests/corpus/corpus.py --checkouts DIR    takes the repositories from DIR/OWNER+NAME
python tests/corpus/corpus.py --table            writes the table of the kept results only
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing.pool import ThreadPool
from pathlib import Path
from threading import Lock
from typing import Any

from corpus_page import write_table
from public_programs import HERE, STAND_INS, Program, check_out, load, prepare

ROOT = HERE.parents[1]
# Seconds for an examination, whatever its own limits are.
LIMIT = 1800
# The imports of some recipes are not safe in threads.
_PREPARING = Lock()


def main() -> int:
    """Runs the command, and returns 1 if a program was judged otherwise than expected."""
    request = _parser().parse_args()
    work = Path(request.work).absolute()
    results = work / "results"
    results.mkdir(parents=True, exist_ok=True)
    names = {one.name for one in load()}
    # The whole name of a program means this one alone, although others may contain it.
    chosen = [one for one in load() if not request.names or any(_is_meant(one, word, names) for word in request.names)]
    if request.new:
        chosen = [one for one in chosen if not (results / f"{one.name}.json").exists()]
    if not request.table:
        with ThreadPool(request.jobs) as pool:
            pool.map(lambda one: _attempt(one, request), chosen, chunksize=1)
    kept = {path.stem: json.loads(path.read_text()) for path in results.glob("*.json")}
    write_table([(one, kept[one.name]) for one in load() if one.name in kept])
    wrong = [one.name for one in chosen if one.name in kept and set(kept[one.name]["faults"]) - set(one.faults)]
    print(f"faults that were not expected: {', '.join(wrong) or 'none'}")
    return bool(wrong)


def _is_meant(program: Program, word: str, names: set[str]) -> bool:
    return word == program.name if word in names else word in program.name


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--checkouts", help="folder of the repositories, each named OWNER+NAME; nothing is cloned")
    parser.add_argument("--work", default=ROOT / "build" / "corpus", help="folder of copies, data and results")
    parser.add_argument("--jobs", type=int, default=1, help="programs at a time")
    parser.add_argument("--timeout", type=float, default=200, help="seconds after which a run counts as hung")
    parser.add_argument("--new", action="store_true", help="only programs without a result")
    parser.add_argument("--table", action="store_true", help="write the table only")
    return parser


def _attempt(program: Program, request: argparse.Namespace) -> None:
    try:
        _examine(program, request)
    except (OSError, ImportError, subprocess.SubprocessError) as error:
        # Its repository or a package cannot be had: the others can be examined.
        print(f"{program.name}: not examined: {type(error).__name__}: {error}", flush=True)


def _examine(program: Program, request: argparse.Namespace) -> None:
    work = Path(request.work).absolute()
    checkouts, place = Path(request.checkouts or work / "checkouts").absolute(), work / "programs" / program.name
    missing = [name for name in program.packages if find_spec(name) is None]
    if missing:
        print(f"{program.name}: not examined, because {', '.join(missing)} is not installed", flush=True)
        return
    with _PREPARING:
        folder = prepare(program, check_out(program, checkouts, download=not request.checkouts), place)
    libraries = _install(program, work)
    report, log = work / "reports" / f"{program.name}.json", work / "reports" / f"{program.name}.txt"
    report.parent.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    words = [sys.executable, "-m", "ddp_doctor", "--json", report, "--timeout", request.timeout, "--samples", "64"]
    words += ["--gpu-as-cpu"] * program.gpu + shlex.split(program.options)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    paths = [*libraries, *([STAND_INS] if program.stand_ins else []), ROOT]
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    environment |= {key: value.format(root=place) for key, value in program.environment.items()}
    begun = time.monotonic()
    with log.open("w") as output:
        code, mib = _run([*map(str, words), "--", *shlex.split(program.command)], folder, environment, output)
    seconds = time.monotonic() - begun
    result = _result(json.loads(report.read_text()) if report.exists() else {}, code, log)
    result |= {"name": program.name, "commit": program.commit, "seconds": round(seconds, 1), "mib": mib}
    result |= {"python": platform.python_version(), "command": program.command, "doctor": _commit()}
    if seconds > LIMIT:
        result["error"] = f"It was stopped after {LIMIT} s."
    (work / "results" / f"{program.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{program.name}: exit {code}, {seconds:.0f} s, {mib} MiB, faults {result['faults']}", flush=True)


def _run(words: list[str], folder: Path, environment: dict[str, str], output: Any) -> tuple[int, int]:
    """Returns the exit code, and the MiB of the largest process."""
    process = subprocess.Popen(
        words, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    timer = time.monotonic() + LIMIT
    while True:
        done, status, usage = os.wait4(process.pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), usage.ru_maxrss // 1024
        if time.monotonic() > timer:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            timer = time.monotonic() + 30
        time.sleep(0.2)


def _install(program: Program, work: Path) -> list[Path]:
    """Returns the folders of packages in versions of their own; each is installed once."""
    folders = []
    for requirement in program.isolated:
        folder = work / "packages" / requirement.replace("==", "-")
        if not folder.exists():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), requirement]
            subprocess.run(pip, check=True, timeout=300)
        folders.append(folder)
    return folders


def _commit() -> str:
    """Returns the commit of the doctor, with a star if files were changed since; empty outside of a checkout."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=7", "--exclude=*", "--dirty=*"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def _result(report: dict[str, Any], code: int, log: Path) -> dict[str, Any]:
    findings = report.get("findings", [])
    comparison = report.get("comparison") or {}
    return {
        "exit": code,
        "faults": sorted({one["code"] for one in findings if one["verdict"] == "fault"}),
        "others": sorted({f"{one['code']} {one['verdict']}" for one in findings if one["verdict"] != "fault"}),
        "messages": [
            f"{one['code']} {one['verdict']}: {one['message']}"
            for one in findings
            if one["verdict"] in {"fault", "depends on the number of devices", "unclear"}
        ],
        "stages": {stage["name"]: [stage["outcome"], round(stage["seconds"], 1)] for stage in report.get("stages", [])},
        "compared": comparison.get("made"),
        "method": comparison.get("method", ""),
        "why_not_compared": comparison.get("reason", ""),
        "error": (report.get("error") or ("" if report else _why_no_report(code, log)))[-600:],
        "hang": bool(report.get("hang")),
    }


def _why_no_report(code: int, log: Path) -> str:
    return f"The doctor was killed by {signal.Signals(-code).name}." if code < 0 else log.read_text()


if __name__ == "__main__":
    sys.exit(main())
