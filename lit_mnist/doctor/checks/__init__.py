"""The checks, one file each, named by their code.

A check is a module with
    TITLE, CAUSE, FIX   texts; TITLE has at most eight words
    THREADS             `owner/repository#number` or addresses where others reported the fault
    STRUCTURAL          whether it reads indices, sequences and modes only, which needs no equal numbers
    check(evidence)     returns its findings; none if all is well
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType


def load_checks() -> dict[str, ModuleType]:
    """Returns all checks by code, such as `LD001`, in order."""
    names = sorted(info.name for info in pkgutil.iter_modules(__path__) if info.name.startswith("ld"))
    return {name.upper(): importlib.import_module(f"{__name__}.{name}") for name in names}
