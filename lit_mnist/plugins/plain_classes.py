"""The classes whose instances a checkpoint may contain. A class that a file names is looked up, but never imported."""

from __future__ import annotations

import dataclasses
import sys
import sysconfig
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from types import FunctionType, MemberDescriptorType, ModuleType, SimpleNamespace
from typing import Any

_FRAMEWORKS = frozenset(
    {"torch", "lightning", "pytorch_lightning", "torchmetrics", "numpy", "transformers", "lit_mnist", "builtins"}
)
_STANDARD = sys.stdlib_module_names - {"__main__"}
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))
_RECORDS = (Namespace, SimpleNamespace)


def name_of(kind: type) -> str:
    """Returns the name of a class in a checkpoint."""
    return f"{kind.__module__}:{kind.__qualname__}"


def package_of(kind: type) -> str:
    """Returns the top-level package of a class."""
    return str(kind.__module__).partition(".")[0]


def packages_of(kinds: Iterable[type]) -> frozenset[str]:
    """Returns the top-level packages of classes, without those of libraries that every module uses."""
    return frozenset(package_of(base) for kind in kinds for base in kind.__mro__) - _FRAMEWORKS - _STANDARD


def is_own(kind: type, packages: frozenset[str]) -> bool:
    """Returns whether the attributes of a class's instances are the user's.

    Those of the standard library and of installed packages are not: they may be connections, handles or identifiers of
    this process.

    Args:
        kind: The class.
        packages: The top-level packages of the module and of its children.
    """
    package = package_of(kind)
    if kind in _RECORDS or dataclasses.is_dataclass(kind) or package in packages:
        return True
    if package in _FRAMEWORKS | _STANDARD:
        return False
    return not str(getattr(sys.modules.get(kind.__module__), "__file__", "")).startswith(_INSTALLED)


def find_class(name: str, known: Mapping[str, type]) -> type | None:
    """Returns a class of the live module, or one that is imported already and has no finalizer; None if there is none.

    Args:
        name: What `name_of` has returned.
        known: The classes of the live module's values.
    """
    if name in known:
        return known[name]
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = vars(found).get(part) if isinstance(found, ModuleType | type) else None
    # A finalizer would run with attributes from the file.
    if not isinstance(found, type) or name_of(found) != name or any("__del__" in vars(base) for base in found.__mro__):
        return None
    return found


def can_be_built(kind: type, base: type, packages: frozenset[str]) -> bool:
    """Returns whether an instance of a class can be built from its content alone.

    Args:
        kind: The class.
        base: The built-in type that has the content, or `object` for an object with attributes.
        packages: The top-level packages of the module and of its children.
    """
    if not issubclass(kind, base) or issubclass(kind, Enum):
        return False
    if base is object and not (kind in _RECORDS or dataclasses.is_dataclass(kind) or package_of(kind) in packages):
        return False
    if kind in _RECORDS:
        return True
    # A class in C may need more than its base's content.
    bases = kind.__mro__[: kind.__mro__.index(base)]
    new: Any = kind.__new__
    return all(isinstance(vars(each).get("__module__"), str) for each in bases) and (
        new is base.__new__ or isinstance(new, FunctionType)
    )


def build(kind: type, base: type, *content: Any) -> Any:
    """Returns an instance that the built-in type makes: no code of the class runs."""
    return kind() if kind in _RECORDS else base.__new__(kind, *content)


def attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the attributes of an object, those in slots included."""
    yield from list(getattr(value, "__dict__", {}).items())
    for name, slot in _slots(type(value)).items():
        try:
            yield name, slot.__get__(value)
        except AttributeError:
            continue


def set_attributes(value: Any, attributes: Mapping[str, Any]) -> None:
    """Makes these the attributes of an object, without calling code of its class."""
    slots, own = _slots(type(value)), getattr(value, "__dict__", {})
    for name, slot in slots.items():
        if name in attributes:
            slot.__set__(value, attributes[name])
        else:
            with suppress(AttributeError):
                slot.__delete__(value)
    for name in set(own) - set(attributes):
        del own[name]
    own.update({name: each for name, each in attributes.items() if name not in slots})


def hashes_content(kind: type) -> bool:
    """Returns whether the hash of an instance needs its attributes."""
    found: Any = kind.__hash__
    return found not in (None, object.__hash__)


def _slots(kind: type) -> dict[str, Any]:
    found = {}
    for base in kind.__mro__:
        if "__slots__" in vars(base):
            found.update({name: each for name, each in vars(base).items() if isinstance(each, MemberDescriptorType)})
    return found
