"""Runs the commands of a page and compares what they print with the page.

A page shows a command and its output in a block of the language `console`:

    ```console
    $ python train.py --devices 2 --run-dir runs/first
    ...
    tested    98.52% (9852 of 10000), loss 0.0461
    ```

- All commands of a page run in one folder, in order. An exit code other than 0 is an error, unless the command ends
  with `; echo "exit code $?"`.
- Every shown line must be printed, in this order. A line `...` stands for any lines, `...` within a line for any text.
- Numbers with a decimal point may differ a little, because processors round differently, and so may counts of correct
  samples. Times and rates are not compared. All other text and all other numbers must be equal.
- A command without output is only run.
"""

from __future__ import annotations

import importlib
import math
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from conftest import ROOT
from processes import Done, run_forked

from ddp_doctor.command import main as doctor
from lit_mnist.cli.main import main

# Imported once, before the fork: they take each command seconds. (DDP imports torch's compiler.)
for _name in ("torch._dynamo", "lightning.pytorch", "accelerate"):
    importlib.import_module(_name)

# What a checkout has and a page's folder must have, too.
LINKED = ("train.py", "configs", "examples", "benchmarks", "tests", "docs", "lit_mnist", "ddp_doctor")
EXIT_CODE = '; echo "exit code $?"'
BLOCK = re.compile(r"^( *)```console\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
ENGINE = re.compile(r"lit_mnist\.engines\.(\w+)")
# A shell is needed for these; everything else runs in a process forked from this one, which has imported torch.
SHELL = re.compile(r"[|&;<>$*`]")
TOKEN = re.compile(
    r"(?P<any>\.\.\.)"
    r"|(?P<time>\d[\d,.]*(?= ?(?:s|ms|min|h|images/s|samples/s|MB/s|GB/s|MiB|GiB)\b))"
    r"|(?P<count>(?<=\()\d+(?= of \d+\)))"
    r"|(?P<number>(?<![\w.])[-+]?\d+\.\d+(?:e[-+]?\d+)?(?![\w.]*\.py))"
    r"|(?P<space>\s+)"
)


@dataclass(frozen=True)
class Command:
    """A command of a page, with the lines that it must print."""

    page: str
    line: int
    text: str
    expected: tuple[str, ...]


def commands_of(page: Path) -> list[Command]:
    """Returns the commands of a page in order."""
    text, found = page.read_text(encoding="utf-8"), []
    for block in BLOCK.finditer(text):
        number = text.count("\n", 0, block.start()) + 2
        lines = [line.removeprefix(block[1]) for line in block[2].splitlines()]
        starts = [index for index, line in enumerate(lines) if line.startswith("$ ")]
        assert starts[:1] == [0], f"{page}:{number}: a console block begins with a command: '$ ...'"
        for begin, end in zip(starts, [*starts[1:], len(lines)], strict=True):
            words, index = lines[begin].removeprefix("$ "), begin + 1
            while words.endswith("\\"):
                words, index = words[:-1].rstrip() + " " + lines[index].strip(), index + 1
            found.append(Command(page.name, number + begin, words, tuple(lines[index:end])))
    return found


def run(command: Command, folder: Path, timeout: float = 120) -> Done:
    """Runs a command in the folder of its page; its output and its errors are in the order of their lines."""
    shown_code = command.text.endswith(EXIT_CODE)
    text = command.text.removesuffix(EXIT_CODE)

    def work() -> int:
        os.dup2(1, 2)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        os.chdir(folder)
        os.environ["COLUMNS"] = "100"
        # The commands of the environment that runs the tests, which need not be activated.
        os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        code = _work(text)()
        if shown_code:
            print("exit code", code)
        return 0 if shown_code else code

    (folder.parent / "output").mkdir(exist_ok=True)
    return run_forked(work, folder.parent / "output", timeout)


def _work(text: str) -> Callable[[], int]:
    if SHELL.search(text):
        return lambda: subprocess.run(["bash", "-c", text], check=False).returncode
    words = shlex.split(text)
    while words and re.fullmatch(r"\w+=.*", words[0]):
        name, _, value = words.pop(0).partition("=")
        os.environ[name] = value
    match words:
        case ["ddp-doctor", *rest]:
            return lambda: doctor(rest)
        case ["lit-mnist", *rest] | ["python", "train.py", *rest]:
            return lambda: main(rest)
        case ["python", "-m", name, *rest] if engine := ENGINE.fullmatch(name):
            return lambda: main(rest, engine=engine[1])
        case ["python", "-m", name, *rest]:
            return lambda: _script(lambda: runpy.run_module(name, run_name="__main__", alter_sys=True), rest)
        case ["python", name, *rest] if name.endswith(".py"):
            return lambda: _script(
                lambda: runpy.run_path(str(Path(name).resolve()), run_name="__main__"), [name, *rest]
            )
    return lambda: subprocess.run(words, check=False).returncode


def _script(start: Callable[[], object], arguments: list[str]) -> int:
    sys.argv = [sys.argv[0], *arguments] if not arguments[:1] or not arguments[0].endswith(".py") else arguments
    sys.path.insert(0, str(ROOT))
    try:
        start()
    except SystemExit as error:
        return int(error.code or 0)
    return 0


def prepare(folder: Path) -> Path:
    """Makes the folder in which the commands of a page run; it looks like a checkout."""
    work = folder / "checkout"
    work.mkdir()
    for name in LINKED:
        (work / name).symlink_to(ROOT / name)
    return work


def find_difference(expected: tuple[str, ...], output: str) -> str | None:
    """Returns the first shown line that was not printed where the page shows it, or None."""
    shown = [line.rstrip() for line in expected if line.strip()]
    printed = [line.rstrip() for line in output.splitlines() if line.strip()]
    if not shown:
        return None
    position, skips = 0, False
    for line in shown:
        if line.strip() == "...":
            skips = True
            continue
        end = len(printed) if skips else position + 1
        found = next(
            (index for index in range(position, min(end, len(printed))) if matches(line, printed[index])), None
        )
        if found is None:
            return line
        position, skips = found + 1, False
    return None if skips or position == len(printed) else f"(nothing more) but found: {printed[position]}"


def matches(shown: str, printed: str) -> bool:
    """Returns whether a printed line is the shown one, apart from what may differ."""
    pattern, numbers, end = "", [], 0
    for token in TOKEN.finditer(shown):
        pattern += re.escape(shown[end : token.start()])
        end = token.end()
        if token.lastgroup in {"number", "count"}:
            pattern += r"([-+]?[\d.]+(?:e[-+]?\d+)?)"
            numbers.append((float(token[0]), token.lastgroup))
        else:
            pattern += {"any": ".*?", "time": r"[\d,.]+", "space": r"\s+"}[str(token.lastgroup)]
    found = re.fullmatch(pattern + re.escape(shown[end:]), printed)
    return found is not None and all(
        _close(number, float(text), kind) for (number, kind), text in zip(numbers, found.groups(), strict=True)
    )


def _close(shown: float, printed: float, kind: str | None) -> bool:
    return math.isclose(shown, printed, rel_tol=0.02 if kind == "count" else 0.05, abs_tol=0.003)
