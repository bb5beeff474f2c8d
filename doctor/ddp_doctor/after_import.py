"""Changes modules of other packages as soon as they are imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder of modules, for `sys.meta_path`. Modules that are imported already are changed at once.

    Args:
        changes: What is called with a module after its import, by the name of the module.
        missing: Is called with the name of such a module that does not exist.
    """

    def __init__(self, changes: dict[str, Callable[[Any], None]], missing: Callable[[str], None] | None = None) -> None:
        self._changes, self._missing = changes, missing
        self._loaders: dict[str, Any] = {}
        self._searching: set[str] = set()
        for name in [name for name in changes if name in sys.modules]:
            self._changes.pop(name)(sys.modules[name])

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> Any:
        """Finds a module by the other finders."""
        if fullname not in self._changes or fullname in self._searching:
            return None
        # Some packages look for a module before anybody imports it.
        self._searching.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.remove(fullname)
        if spec is not None:
            self._loaders[fullname], spec.loader = spec.loader, self
        elif self._missing is not None:
            self._missing(fullname)
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        """Creates the module as its own loader does."""
        return self._loaders[spec.name].create_module(spec)

    def exec_module(self, module: Any) -> None:
        """Imports the module, and changes it."""
        name = module.__name__
        module.__spec__.loader = module.__loader__ = self._loaders[name]
        self._loaders[name].exec_module(module)
        self._changes.pop(name)(module)
