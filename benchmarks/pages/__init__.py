"""The benchmark as an HTML page and as text for the terminal."""

from __future__ import annotations

from typing import Any, NamedTuple


class Part(NamedTuple):
    """A part of a section of the page.

    Attributes:
        kind: `text`, `note`, `method`, `table` or `waterfall`.
        content: What the template draws.
        label: The name of a table, or the legend of a waterfall.
    """

    kind: str
    content: Any
    label: Any = ""
