"""What an engine costs: speed, start, memory, traffic, and lines to read."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lit_mnist.run.timing import spread

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}

_PACKAGE = Path(__file__).parents[1]
_LIGHTNING_SIDE = ("module.py", "datamodule.py", "trainer.py", "callbacks.py")


def files_of(engine: str) -> list[Path]:
    """Returns an engine's own sources: its loop, and for Lightning the template that its Trainer calls."""
    called = _LIGHTNING_SIDE if engine == "lightning" else ()
    return [_PACKAGE / "engines" / f"{engine}.py", *(_PACKAGE / name for name in called)]


def _most(values: Iterable[float | None]) -> float | None:
    """Returns the largest of the figures that were counted; None where none was."""
    return max((value for value in values if value is not None), default=None)


def lines_of_code(path: Path) -> int:
    """Returns the lines of a Python file that hold code: no blank ones, comments or docstrings."""
    source = path.read_text()
    documentation: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documentation.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = {line for token in tokens if token.type not in _NO_CODE for line in range(token.start[0], token.end[0] + 1)}
    return len(code - documentation)


def cost_of(files: Sequence[Path], traces: Sequence[dict[str, Any]], timed: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns an engine's costs.

    Args:
        files: The engine's sources, which no other engine uses.
        traces: The ranks' traces, with what each has sent; the busiest rank counts.
        timed: The results of the timed runs.
    """
    traffic = [found["traffic"] for found in traces if found["traffic"]["steps"]]
    return {
        "images_per_s": spread([result["train"]["images_per_s"] for result in timed]),
        "seconds_to_first_step": spread([result["seconds_to_first_step"] for result in timed]),
        "peak_memory_bytes": spread([result["peak_memory_bytes"] for result in timed]),
        "bytes_sent_per_step": _most(found["bytes_sent"] for found in traffic),
        "payload_bytes_per_step": _most(found["payload_bytes"] for found in traffic),
        "collectives_per_step": max(
            (found["collectives"] for found in traffic), key=lambda calls: sum(calls.values()), default=None
        ),
        "lines_of_code": sum(map(lines_of_code, files)),
    }
