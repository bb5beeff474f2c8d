"""The guarantees of the project as parts for any Lightning code; see docs/plugins.md.

The names below are imported at their first use: importing the package imports neither torch nor Lightning.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_mnist.plugins.exact_checkpoint import ExactCheckpoint
    from lit_mnist.plugins.failure_report import FailureReport

__all__ = ["ExactCheckpoint", "FailureReport"]

_HOMES = {"ExactCheckpoint": "exact_checkpoint", "FailureReport": "failure_report"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
