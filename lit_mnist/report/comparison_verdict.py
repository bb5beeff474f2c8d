"""Who of the compared engines trained the same: each one's part in the comparison, and the verdict in words."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from lit_mnist.report.formats import text

NOTHING: Mapping[str, Any] = {}


def part(mapping: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns a mapping's mapping of that name, an empty one where it is absent or None."""
    return mapping.get(name) or NOTHING


def mappings(value: object) -> list[Mapping[str, Any]]:
    """Returns a list's mappings, an empty list where it is absent or none."""
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list | tuple) else []


def engines(comparison: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Returns the engines in the comparison's order."""
    return comparison.get("engines") or []


def took_part(engine: Mapping[str, Any]) -> bool:
    """Returns whether an engine was neither skipped nor failed."""
    return engine.get("status") not in ("skipped", "failed")


def met(engine: Mapping[str, Any]) -> bool | None:
    """Returns whether an engine met what is expected of it; None for the reference and where nobody can say."""
    answer: bool | None = part(engine, "comparison").get("met")
    return answer if took_part(engine) else None


def plain(value: object) -> str:
    """Returns any value as text without control characters, which a terminal would obey."""
    # what is not UTF-8 in an argument reaches Python as lone surrogates, which no stream takes
    return html.unescape(text(value)).encode("utf-8", "backslashreplace").decode("utf-8")


def label(engine: Mapping[str, Any]) -> str:
    """Returns an engine's name with its variant, in plain text."""
    variant = engine.get("variant")
    return plain(engine.get("name")) + (f" ({plain(variant)})" if variant else "")


def reference(comparison: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the engine that the others are compared with, the first unjudged one of that name; empty without one."""
    name = comparison.get("reference")
    named = (each for each in engines(comparison) if name is not None and name in (each.get("name"), label(each)))
    return next((each for each in named if part(each, "comparison").get("met") is None), NOTHING)


def headline(comparison: Mapping[str, Any]) -> tuple[str, str, str]:
    """Returns the verdict as a large figure, its words and a tone."""
    everyone, sure = engines(comparison), agreeing(comparison)
    ran = sum(map(took_part, everyone))
    wrong = [met(engine) for engine in everyone].count(False)
    if wrong:
        return f"{wrong} of {wrong + len(sure)}", "engines differ" if wrong > 1 else "engines differs", "bad"
    if all(met(engine) is None for engine in everyone):
        return f"{ran} of {len(everyone)}", "engines ran" + ", and nothing was compared" * (ran > 0), "bad"
    big = f"{len(sure)} of {len(sure)}"
    if comparison.get("equal") is False:
        return big, "engines agree, but the comparison as a whole did not pass", "bad"
    return big, "engines trained the same bits" if all(sure) else "engines agree as closely as expected", ""


def agreeing(comparison: Mapping[str, Any]) -> list[bool]:
    """Returns for the reference and each engine that met what is expected whether its weights are the same bits."""
    chosen = reference(comparison)
    return [
        each is chosen or part(each, "comparison").get("weights") is True
        for each in engines(comparison)
        if took_part(each) and (each is chosen or met(each))
    ]


def notes(comparison: Mapping[str, Any]) -> list[str]:
    """Returns what the headline leaves out: how many are merely close, and who failed, was skipped or not judged."""
    everyone, sure = engines(comparison), agreeing(comparison)
    states = [engine.get("status") for engine in everyone]
    wrong = [met(engine) for engine in everyone].count(False)
    apart = {
        "failed": states.count("failed"),
        "skipped": states.count("skipped"),
        "not judged": sum(map(took_part, everyone)) - len(sure) - wrong,
    }
    close = [] if all(sure) else [f"{sum(sure)} in every bit, {len(sure) - sum(sure)} as closely as expected"]
    return close + [", ".join(f"{n} {word}" for word, n in apart.items() if n)] * any(apart.values())
