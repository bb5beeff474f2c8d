"""The message for plugins that are passed as callbacks."""

from __future__ import annotations

from typing import Any

from lit_mnist.errors import InputError


class NotACallback:
    """A plugin, which Lightning accepts among the callbacks and fails to call.

    A Trainer asks each callback that has a state for its key, at its construction.
    """

    def state_dict(self) -> dict[str, Any]:
        """Returns no state."""
        return {}

    @property
    def state_key(self) -> str:
        """Raises `InputError`."""
        name = type(self).__name__
        raise InputError(f"{name} is a plugin: pass it in Trainer(plugins=[{name}()]), not among the callbacks.")
