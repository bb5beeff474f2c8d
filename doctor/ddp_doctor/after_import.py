"""Changes modules of other packages as soon as they are imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules that are changed by the other finders, and changes them."""

    def __init__(self) -> None:
        self.changes: dict[str, list[Callable[[Any], None]]] = {}
        self._loaders: dict[str, Any] = {}
        self._searching: set[str] = set()

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> Any:
        """Finds a module by the other finders."""
        if fullname not in self.changes or fullname in self._searching:
            return None
        # Some packages look for a module before anybody imports it.
        self._searching.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.remove(fullname)
        if spec is not None:
            self._loaders[fullname], spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        """Creates the module as its own loader does."""
        return self._loaders[spec.name].create_module(spec)

    def exec_module(self, module: Any) -> None:
        """Imports the module, and changes it."""
        name = module.__name__
        module.__spec__.loader = module.__loader__ = self._loaders[name]
        self._loaders[name].exec_module(module)
        for change in self.changes.pop(name):
            change(module)


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
