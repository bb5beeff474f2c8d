"""A dataloader that stands in for another one."""

from __future__ import annotations

from typing import Any


class LoaderProxy:
    """Passes everything but the iteration on to a dataloader, whose attributes are also attributes of this object.

    Args:
        loader: The dataloader.
    """

    delivered: int

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.delivered = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning sets attributes of loaders, such as the worker_init_fn.
        own = name.startswith("_") or name == "delivered"
        object.__setattr__(self if own else self._loader, name, value)

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing, so that Lightning does not warn that the loader has no state: the callback has one."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing."""


def unwrapped(loader: Any) -> Any:
    """Returns the dataloader that a proxy stands for, or the dataloader itself."""
    return loader._loader if isinstance(loader, LoaderProxy) else loader
