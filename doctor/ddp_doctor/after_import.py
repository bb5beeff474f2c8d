"""Changes modules of other packages as soon as they are imported."""

import importlib.abc
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that are changed by the other finders."""

    def __init__(self) -> None:
        self.changes: dict[str, list[Callable[[Any], None]]] = {}

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> Any:
        """Finds a module by the other finders, whose loader then also changes it."""
        if fullname not in self.changes:
            return None
        found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec: Any = next(filter(None, found), None)
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            # Some packages look for a module before anybody imports it.
            for change in self.changes.pop(fullname, ()):
                change(module)

        spec.loader.exec_module = exec_module
        return spec


_FINDER = _Finder()


def after_import(changes: dict[str, Callable[[Any], None]]) -> None:
    """Changes modules as soon as they are imported; those that are imported already at once.

    Args:
        changes: What is called with a module after its import, by the name of the module.
    """
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    for name, change in changes.items():
        if name in sys.modules:
            change(sys.modules[name])
        else:
            _FINDER.changes.setdefault(name, []).append(change)
