"""The private parts of torch's compiler that defer its execution to the first use of it.

Importing `torch._dynamo` takes half as long as importing torch. Optimizers, DistributedDataParallel, process groups,
Lightning and torchvision import it without compiling anything: to exclude a function from compilation, to end a graph,
or to ask whether a module is compiled. Until the package is executed, nothing is compiled, which answers these
questions. `defer_compiler` registers a finder that answers them, and executes the package when any other name is used.

The private names are those in `_ANSWERS`. If torch uses further ones, the package is executed as without this file,
which `test_a_training_imports_no_compiler` (tests/cli/test_deferred_compiler.py) detects. An answer that differs from
torch's is detected by `test_what_is_compiled_does_not_change` in the same file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from threading import RLock
from types import FunctionType, ModuleType, new_class
from typing import Any

_PACKAGE = "torch._dynamo"
_LOCK = RLock()
# The modules that are imported but not executed.
_PENDING: dict[str, ModuleType] = {}


def defer_compiler() -> None:
    """Defers the execution of `torch._dynamo` in this process and in those forked from it.

    A package that is imported already stays as it is.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def import_compiler() -> None:
    """Imports torch's compiler, which each rank would otherwise import when it makes its optimizer.

    Ranks that are forked later share its 70 MiB. A deferred compiler is not executed.
    """
    import_module(_PACKAGE)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _PENDING or (fullname in _ANSWERS and (fullname == _PACKAGE or _PACKAGE in _PENDING)):
            spec = PathFinder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _DeferringLoader(spec.loader)
            return spec
        if fullname.startswith(f"{_PACKAGE}.") and _PACKAGE in _PENDING:
            _execute(_PENDING[_PACKAGE])
        return None


class _DeferringLoader(Loader):
    """Defers a module at its first import, and executes the same module when its package is being executed."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return _PENDING.get(spec.name) or self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        if name not in _PENDING:
            vars(module).update(_ANSWERS[name])
            _PENDING[name] = module
            module.__class__ = _Deferred
        else:
            _execute_now(module)


class _Deferred(ModuleType):
    """A module that is executed when a name is used that it has no answer for."""

    def __getattr__(self, name: str) -> Any:
        if f"{self.__name__}.{name}" in _ANSWERS and _PACKAGE in _PENDING:
            return import_module(f"{self.__name__}.{name}")
        # The import system asks a module whether it is a package.
        if name != "__path__":
            _execute(self)
        return ModuleType.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system sets the submodules, and names like `__spec__`.
        if not isinstance(value, ModuleType) and not name.startswith("__"):
            _execute(self)
        ModuleType.__setattr__(self, name, value)


def _execute(module: ModuleType) -> None:
    """Executes the package, which imports its modules in its own order, and then the module if it is left.

    Another thread waits for the end, as in an import.
    """
    with _LOCK:
        package = _PENDING.get(_PACKAGE)
        if package is not None:
            for name in _PENDING.keys() - {_PACKAGE}:
                sys.modules.pop(name, None)
                vars(package).pop(name.rpartition(".")[2], None)
            try:
                _execute_now(package)
            except BaseException:
                # As after an import that fails, the next one tries it again.
                sys.modules.pop(_PACKAGE, None)
                _PENDING.clear()
                raise
            while _TO_DISABLE:
                _TO_DISABLE.pop()()
            # Who has imported an answer keeps it. It is not compiled.
            for answer in [each for answers in _ANSWERS.values() for each in answers.values()]:
                if isinstance(answer, FunctionType):
                    package.decorators.skip(answer)
            if not _PENDING:
                sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
        if module.__name__ not in sys.modules:
            import_module(module.__name__)


def _execute_now(module: ModuleType) -> None:
    name = module.__name__
    del _PENDING[name]
    for answer in _ANSWERS[name]:
        vars(module).pop(answer, None)
    loader = module.__loader__
    assert isinstance(loader, Loader)
    loader.exec_module(module)
    # A release of torch may lack a name, and then does not ask for it.
    _EXECUTED.update({(name, answer): vars(module)[answer] for answer in _ANSWERS[name] if answer in vars(module)})
    module.__class__ = ModuleType


def _compiler(module: str, name: str) -> Any:
    """Returns an object of the executed compiler."""
    _execute(import_module(module))
    return _EXECUTED[module, name]


def _answer(module: str, name: str, value: object) -> Callable[..., Any]:
    """Returns a function that returns a value until the compiler is executed, and then calls the compiler's own."""

    def function(*args: Any, **kwargs: Any) -> Any:
        real = _EXECUTED.get((module, name))
        return value if real is None else real(*args, **kwargs)

    function.__name__ = name
    return function


def disable(fn: Any = None, recursive: bool = True, **options: Any) -> Any:
    """Excludes a function from compilation as soon as there is a compiler. See `torch.compiler.disable`."""
    if fn is None:
        return partial(disable, recursive=recursive, **options)
    if _PACKAGE not in _PENDING or not isinstance(fn, FunctionType):
        return _compiler(_PACKAGE, "disable")(fn, recursive, **options)
    disabled: list[Callable[..., Any]] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        return (disabled[0] if disabled else fn)(*args, **kwargs)

    def disable_now() -> None:
        disabled.append(_compiler(_PACKAGE, "disable")(fn, recursive, **options))
        # Nor is the function around it compiled.
        sys.modules[_PACKAGE].decorators.skip(call)

    _TO_DISABLE.append(disable_now)
    return wraps(fn)(call) if options.get("wrapping", True) else call


def is_compile_supported(device: Any) -> Any:
    """Executes the compiler and asks it. torchvision imports the function and calls it when it compiles."""
    return _compiler(f"{_PACKAGE}.utils", "is_compile_supported")(device)


class _ClassOfCompiled(type):
    """The type of `OptimizedModule`, which stands for the compiler's class of that name."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        if not bases:
            return super().__new__(cls, name, bases, namespace)
        real = tuple(_compiler(_PACKAGE, "OptimizedModule") if isinstance(base, cls) else base for base in bases)
        return new_class(name, real, exec_body=lambda body: body.update(namespace))

    def __instancecheck__(cls, instance: object) -> bool:
        return _PACKAGE not in _PENDING and isinstance(instance, _compiler(_PACKAGE, "OptimizedModule"))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return _PACKAGE not in _PENDING and issubclass(subclass, _compiler(_PACKAGE, "OptimizedModule"))

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return _compiler(_PACKAGE, "OptimizedModule")(*args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        return getattr(_compiler(_PACKAGE, "OptimizedModule"), name)


class OptimizedModule(metaclass=_ClassOfCompiled):
    """No module is an instance of it until the compiler is executed."""


# Each disables a function that `disable` was asked to, once the compiler is executed.
_TO_DISABLE: list[Callable[[], None]] = []
_EXECUTED: dict[tuple[str, str], Any] = {}
# The names that are answered without executing the compiler, by module.
_ANSWERS: dict[str, dict[str, Any]] = {
    _PACKAGE: {
        "OptimizedModule": OptimizedModule,
        "disable": disable,
        "graph_break": _answer(_PACKAGE, "graph_break", None),
    },
    f"{_PACKAGE}.trace_rules": {"clear_lru_cache": _answer(f"{_PACKAGE}.trace_rules", "clear_lru_cache", None)},
    f"{_PACKAGE}.utils": {
        # The default of `torch._dynamo.config.optimize_ddp`. Changing that executes the compiler.
        "get_optimize_ddp_mode": _answer(f"{_PACKAGE}.utils", "get_optimize_ddp_mode", "ddp_optimizer"),
        "is_compile_supported": is_compile_supported,
    },
}
