"""The programs of the suite, each a small change of a healthy one, and what the doctor says about each.

A table (`*.txt`) begins with its title. `=== START` names a program of `bases/` and how it starts: `loop.py:main` is a
function that each rank calls, `module.py:Module Data` are a LightningModule and its data, and `torchrun loop.py` and
`python loop.py` are commands. `## NAME CODE: NOTE` begins a program with its fault; it has no code if it is healthy,
and `note` or `depends` after the code if the verdict is not `fault`. `~OLD => NEW` changes text within lines, wherever
it occurs. Other changes are written as those of a diff: lines with `-` are text of the program, those with `+` replace
it, and those with a space stay, with what is added before or after them. Lines with `+` alone stand before the last
function or class. Changes before the first `##` are those of all programs below the start. `## NAME < OTHER` changes
another program of the table. A line of the old text that ends with `...` stands for itself and the block below it, and
`FIRST ... LAST` for all that is between them. Each change is made to what those above it have left.
"""

import re
import tempfile
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

PROJECTS = Path(__file__).parent
DEPENDS = "depends on the number of devices"
COMMANDS = {"torchrun": ("torchrun", "--standalone", "--nproc-per-node", "2", "{file}"), "python": ("python", "{file}")}
_HEADER = re.compile(r"## (\w+)(?: < (\w+))?(?: (LD\d{3}))?(?: (note|depends))?: (.+)")
# Lines that stand before one that stays, and otherwise old lines with what replaces or follows them.
_CHANGE = re.compile(r"^~.*\n|(?:^\+.*\n)+^ .*\n|(?:^[- ].*\n)*(?:^\+.*\n)*", re.MULTILINE)


@dataclass(frozen=True)
class Case:
    """A program and the expected report.

    Attributes:
        name: Name of the program.
        note: The fault, or what the healthy program shows.
        codes: The codes of the faults; empty if the program is healthy.
        verdict: Verdict of these codes.
        text: The source; empty if an installed package has the program.
        target: A LightningModule, a function called on each rank (without arguments or with `(rank, world_size)`), or
            empty for a command.
        data: A LightningDataModule, or empty if the target needs none.
        command: Words of the command; `{file}` stands for the path.
    """

    name: str
    note: str = ""
    codes: tuple[str, ...] = ()
    verdict: str = "fault"
    text: str = ""
    target: str = ""
    data: str = ""
    command: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """The path of the file, which is written into a temporary folder."""
        path = Path(_folder().name, f"{self.name}.py")
        path.write_text(self.text)
        return path

    @property
    def words(self) -> tuple[str, ...]:
        """The command with the path of the file."""
        return tuple(word.format(file=self.path) for word in self.command)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="suite-")


def cases(table: str) -> tuple[Case, ...]:
    """Returns the programs of a table."""
    found = dict[str, Case]()
    for section in re.split(r"^=== ", (PROJECTS / table).read_text(), flags=re.MULTILINE)[1:]:
        common, *rows = re.split(r"^(?=## )", section, flags=re.MULTILINE)
        start, *data = common.partition("\n")[0].split()
        words = COMMANDS.get(start, ())
        file, _, target = (data.pop() if words else start).partition(":")
        base = changed((PROJECTS / "bases" / file).read_text(), common)
        for row in rows:
            header = _HEADER.match(row)
            assert header, f"{table}: {row}"
            name, other, code, verdict, note = header.groups(default="")
            verdict = DEPENDS if verdict == "depends" else verdict or "fault"
            text = changed(found[other].text if other else base, row)
            found[name] = Case(name, note, (code,) if code else (), verdict, text, target, "".join(data), words)
    return tuple(found.values())


def changed(program: str, row: str) -> str:
    """Returns a program with the changes of a row; the new lines are indented as the old ones."""
    for change in _CHANGE.finditer(row):
        lines = change[0].splitlines()
        if change[0].startswith("~"):
            before, _, after = lines[0][1:].partition(" =>")
            lines = [f"-{before}", *[f"+{after[1:]}"] * bool(after)]
        old, new = ("\n".join(line[1:] for line in lines if line[0] != sign) for sign in "+-")
        if old:
            # The indentation of the line in which the old text begins precedes its other lines, and the new ones.
            first, *others = (_pattern(line) for line in old.split("\n"))
            pattern = "".join(
                (rf"^(?P<indent> *)(?P<before>.*?){first}", *(rf"\n(?P=indent){line}" for line in others))
            )
            program, count = re.subn(pattern, partial(_indented, new), program, flags=re.MULTILINE)
            assert count, f"nothing to change:\n{old}\nin\n{program}"
        elif new:
            last = [match.start() for match in re.finditer(r"^(?=(def|class) )", program, re.MULTILINE)][-1]
            program = f"{program[:last]}{new}\n\n\n{program[last:]}"
    # A line that became empty.
    return re.sub(r"^ +\n", "", program, flags=re.MULTILINE)


def _pattern(line: str) -> str:
    """Returns the pattern of a line of old text, possibly with the block below it, or with all lines up to a text."""
    first, several, last = line.partition(" ... ")
    if several:
        return rf"{re.escape(first)}(?:.|\n)*?{re.escape(last)}"
    own = line[: len(line) - len(line.lstrip())]
    block = rf"(?:\n+(?P=indent){own} .*)*" if line.endswith(" ...") else ""
    return re.escape(line.removesuffix(" ...")) + block


def _indented(new: str, match: re.Match[str]) -> str:
    return match["indent"] + match["before"] + re.sub(r"\n(?=.)", f"\n{match['indent']}", new)


CASES = cases("faults.txt")
TRAINCHECK = cases("traincheck.txt")
_NO_FAMILY = {"faults.txt", "traincheck.txt", "gpus.txt"}
FAMILIES = {
    path.read_text().partition("\n")[0]: cases(path.name)
    for path in sorted(PROJECTS.glob("*.txt"))
    if path.name not in _NO_FAMILY
}
