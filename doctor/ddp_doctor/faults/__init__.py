"""The checks, one file each, named by what they find.

A check is a module, whose name begins with its code, with
    TITLE, CAUSE, FIX   texts; TITLE has at most nine words
    WRONG               code that has the fault, a few lines
    THREADS             `owner/repository#number` or addresses where others reported the fault, or the closest one
    NUMERIC             if it compares numbers, and so is no structural check; optional
    NEEDS               what must have been observed, or the check is not made (`evidence.requirements`); optional
    EXPLAINS            `gradients` or `weights` if a finding says why these differ, so that LD036 is silent; optional
    check(evidence)     returns its findings; none if all is well
    read(file)          yields what looks like the fault in a `source.file.SourceFile`; optional
"""

import importlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

from ddp_doctor.errors import InputError


@cache
def load_checks() -> dict[str, ModuleType]:
    """Returns the modules of all checks by code, in order, whose import imports no torch."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("ld*.py"))
    return {name[:5].upper(): importlib.import_module(f"{__name__}.{name}") for name in names}


def is_structural(check: ModuleType) -> bool:
    """Returns whether a check reads indices, sequences and modes only."""
    return not hasattr(check, "NUMERIC")


def short_fix(check: ModuleType) -> str:
    """Returns the first sentence of the fix of a check, without its code."""
    text, _, _ = check.FIX.strip().partition("\n ")
    return " ".join(text.split()).rstrip(":.") + "."


def choose_checks(only: Sequence[str], skip: Sequence[str]) -> dict[str, ModuleType]:
    """Returns the modules of the wanted checks by code.

    Args:
        only: Codes, or `structural` for those that need no equal numbers; empty for all.
        skip: Codes that are not wanted, or `structural`.

    Raises:
        InputError: There is no such check, or none is left.
    """
    known = load_checks()
    for code in [*only, *skip]:
        if code not in known and code != "structural":
            raise InputError(f"There is no check {code}.")

    def named(code: str, codes: Sequence[str]) -> bool:
        return code in codes or ("structural" in codes and is_structural(known[code]))

    chosen = {code: check for code, check in known.items() if not named(code, skip) and (not only or named(code, only))}
    if not chosen:
        raise InputError("No check is left: --skip names all that --only does.")
    return chosen
