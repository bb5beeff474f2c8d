"""The versions of the doctor, of Python and of the libraries that a report names."""

import platform
from contextlib import suppress
from importlib import metadata

VERSION = "0.3.0.dev0"
_LIBRARIES = ("torch", "lightning", "pytorch-lightning", "torchmetrics", "torchvision", "transformers", "accelerate")


def library_versions() -> dict[str, str]:
    """Returns the versions of what is installed."""
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
