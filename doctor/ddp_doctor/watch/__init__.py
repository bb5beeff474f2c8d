"""Watches a whole training run for differences between its ranks, while it runs, without changing it.

    ddp-doctor watch -- torchrun --nproc-per-node 2 train.py

In a Lightning script, `Trainer(callbacks=[WatchCallback("watch")])`; in a loop of your own, one line:

    from ddp_doctor.watch import watch
    watch("watch", model)

Each rank writes a few numbers to a file of its own every few steps, and one process compares the files. The ranks send
nothing to each other. If the watch fails, it stops watching, and the run continues.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_doctor.watch.callback import WatchCallback as WatchCallback
    from ddp_doctor.watch.rank import watch as watch

# Lightning and torch are imported by those who use them.
_MODULES = {"WatchCallback": "callback", "watch": "rank"}
__all__ = ["WatchCallback", "watch"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
