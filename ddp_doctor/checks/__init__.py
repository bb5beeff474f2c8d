"""The checks, one file each, named by their code.

A check is a module with
    TITLE, CAUSE, FIX   texts; TITLE has at most eight words
    THREADS             `owner/repository#number` or addresses where others reported the fault
    STRUCTURAL          whether it reads indices, sequences and modes only, which needs no equal numbers
    check(evidence)     returns its findings; none if all is well
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from lit_mnist.errors import InputError, nearest

_FIELDS = ("TITLE", "CAUSE", "FIX", "THREADS", "STRUCTURAL")


@dataclass(frozen=True)
class Description:
    """What a check says of itself.

    Attributes:
        title: What is wrong, in at most eight words.
        cause: What happens, and why nobody notices.
        fix: What to write instead.
        threads: Where others reported it.
        structural: Whether the check needs no equal numbers.
    """

    title: str
    cause: str
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
    """Returns the descriptions of all checks by code, such as `LD001`, in order; this imports no torch."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("ld*.py")):
        values = {}
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in _FIELDS:
                values[node.targets[0].id] = ast.literal_eval(node.value)
        found[path.stem.upper()] = Description(*(values[name] for name in _FIELDS))
    return found


def load_checks() -> dict[str, ModuleType]:
    """Returns the modules of all checks by code."""
    return {code: importlib.import_module(f"{__name__}.{code.lower()}") for code in describe()}


def choose_checks(only: Sequence[str], skip: Sequence[str]) -> dict[str, ModuleType]:
    """Returns the modules of the wanted checks by code.

    Args:
        only: Codes, or `structural` for those that need no equal numbers; empty for all.
        skip: Codes to leave out, or `structural`.

    Raises:
        InputError: There is no such check, or none is left.
    """
    checks = load_checks()
    for code in [*only, *skip]:
        if code not in checks and code != "structural":
            raise InputError(f"There is no check {code}{nearest(code, [*checks, 'structural']) or '.'}")

    def named(code: str, codes: Sequence[str]) -> bool:
        return code in codes or ("structural" in codes and checks[code].STRUCTURAL)

    chosen = {
        code: check for code, check in checks.items() if not named(code, skip) and (not only or named(code, only))
    }
    if not chosen:
        raise InputError("No check is left: --skip leaves out all that were asked for.")
    return chosen
