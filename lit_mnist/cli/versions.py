"""The versions that the commands need: those of the package's own requirements, which pip checks as well."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import metadata

from packaging.requirements import Requirement

from lit_mnist.errors import InputError

# The libraries whose private parts are used, and torchvision, which needs the torch that it was built for.
CHECKED = ("torch", "torchvision", "lightning")
Requires = Callable[[str], list[str] | None]
Version = Callable[[str], str]


def check_versions(
    requires: Requires = metadata.requires, version: Version = metadata.version, platform: str = sys.platform
) -> None:
    """Checks the platform and the installed libraries without importing them.

    Args:
        requires: Returns the requirements of a distribution.
        version: Returns the version of a distribution.
        platform: The name of the platform, as in `sys.platform`.

    Raises:
        InputError: A library is missing or has a version that was not tested, or the platform is not Linux.
    """
    if platform != "linux":
        raise InputError(f"lit_mnist needs Linux, but this is {platform}: use a Linux machine, a container or WSL 2.")
    for owner, names in (("lit_mnist", CHECKED), ("torchvision", ("torch",))):
        for wanted in _requirements(owner, names, requires):
            _check(owner, wanted, version)


def _requirements(owner: str, names: tuple[str, ...], requires: Requires) -> list[Requirement]:
    try:
        found = [Requirement(text) for text in requires(owner) or ()]
    except metadata.PackageNotFoundError:
        # A checkout that is not installed names no requirements.
        return []
    return [wanted for wanted in found if wanted.name in names and wanted.marker is None]


def _check(owner: str, wanted: Requirement, version: Version) -> None:
    needs = f"{owner} needs {wanted.name}{wanted.specifier}"
    # Both at once: pip then selects the torchvision that belongs to the torch.
    others = {"torch": " torchvision", "torchvision": " torch"}.get(wanted.name, "")
    advice = f'pip install "{wanted.name}{wanted.specifier}"{others}'
    try:
        installed = version(wanted.name)
    except metadata.PackageNotFoundError:
        raise InputError(f"{needs}, which is not installed: {advice}.") from None
    if not wanted.specifier.contains(installed, prereleases=True):
        raise InputError(f"{needs}, but {wanted.name} {installed} is installed: {advice}.")
