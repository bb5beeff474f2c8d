"""The checks, one file each, named by what they find.

A check is a module with
    CODE                the code that reports and commands use, such as `LD012`
    TITLE, CAUSE, FIX   texts; TITLE has at most nine words
    WRONG               code that has the fault, a few lines
    THREADS             `owner/repository#number` or addresses where others reported the fault, or the closest one
    STRUCTURAL          whether it reads indices, sequences and modes only, which needs no comparison with one process
    NEEDS               what must have been observed, or the check is not made (`evidence.requirements`); optional
    EXPLAINS            `gradients` or `weights` if a finding says why these differ, so that LD036 is silent; optional
    check(evidence)     returns its findings; none if all is well
    read(file)          yields what looks like the fault in a `source.file.SourceFile`; optional
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from ddp_doctor.errors import InputError, nearest

_FIELDS = ("CODE", "TITLE", "CAUSE", "WRONG", "FIX", "THREADS", "STRUCTURAL")


@dataclass(frozen=True)
class Description:
    """What a check says of itself: its module, its code, what is wrong, why nobody notices, wrong code, and the fix."""

    module: str
    code: str
    title: str
    cause: str
    wrong: str
    fix: str
    threads: tuple[str, ...]
    structural: bool

    @property
    def short_fix(self) -> str:
        """The first sentence of the fix, without its code."""
        lines = self.fix.strip().splitlines()
        code = next((n for n, line in enumerate(lines) if line.startswith(" ")), len(lines))
        return " ".join(lines[:code]).rstrip(":.") + "."


@cache
def describe() -> dict[str, Description]:
    """Returns the descriptions of all checks by code, in order; this reads the files, and imports no torch."""
    found = []
    for path in Path(__file__).parent.glob("[a-z]*.py"):
        nodes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign)]
        values = {node.targets[0].id: node.value for node in nodes if isinstance(node.targets[0], ast.Name)}
        if missing := [name for name in _FIELDS if name not in values]:
            raise KeyError(f"{path} lacks {', '.join(missing)}")
        assert len(ast.literal_eval(values["TITLE"]).split()) <= 9, path
        found.append(Description(path.stem, *(ast.literal_eval(values[name]) for name in _FIELDS)))
    return {check.code: check for check in sorted(found, key=lambda check: check.code)}


def load_checks() -> dict[str, ModuleType]:
    """Returns the modules of all checks by code."""
    return {code: importlib.import_module(f"{__name__}.{check.module}") for code, check in describe().items()}


def choose_checks(only: Sequence[str], skip: Sequence[str]) -> dict[str, ModuleType]:
    """Returns the modules of the wanted checks by code.

    Args:
        only: Codes, or `structural` for those that need no equal numbers; empty for all.
        skip: Codes that are not wanted, or `structural`.

    Raises:
        InputError: There is no such check, or none is left.
    """
    known = describe()
    for code in [*only, *skip]:
        if code not in known and code != "structural":
            raise InputError(f"There is no check {code}{nearest(code, [*known, 'structural']) or '.'}")

    def named(code: str, codes: Sequence[str]) -> bool:
        return code in codes or ("structural" in codes and known[code].structural)

    chosen = {code for code in known if not named(code, skip) and (not only or named(code, only))}
    if not chosen:
        raise InputError("No check is left: --skip names all that --only does.")
    return {code: check for code, check in load_checks().items() if code in chosen}
