"""A made-up comparison, and its page and text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from html_page import Page

from lit_mnist.comparison.summary import text as text_of
from lit_mnist.comparison.summary import write_comparison

CHECKS = ("initial_weights", "samples", "learning_rate", "loss", "weights", "test")


def spread(median: float) -> dict[str, float]:
    return {"median": median, "lowest": 0.5 * median, "highest": 2 * median}


def make_engine(name: str, *, variant: str | None = None, speed: float = 1000.0, **comparison: Any) -> dict[str, Any]:
    same = dict.fromkeys(CHECKS, True) | {"expected": "bits", "met": True, "largest_difference": 0.0}
    return {
        "name": name,
        "variant": variant,
        "world_size": 2,
        "status": "ran",
        "reason": None,
        "install": None,
        "weights_sha256": ["0123456789ab" + "f" * 52] * 2,
        "loss": [2.0, 1.0, 1.5],
        "test": {"accuracy": 0.99, "count": 10_000, "right": 9900, "loss": 0.03},
        "comparison": same | {"first_difference": None} | comparison,
        "cost": {
            "images_per_s": spread(speed),
            "seconds_to_first_step": spread(8.0),
            "peak_memory_bytes": spread(512 * 1024**2),
            "bytes_sent_per_step": 2048.0,
            "payload_bytes_per_step": 1024.0,
            "collectives_per_step": {"allreduce": 3.0, "broadcast": 1.0},
            "lines_of_code": 96,
        },
    }


def make_comparison(*others: dict[str, Any]) -> dict[str, Any]:
    return {
        "experiment": {"seed_everything": 42, "model": {"net": "convnet", "lr": 0.2}, "data": {"name": "mnist"}},
        "world_size": 2,
        "precision": "32-true",
        "device": "cpu",
        "threads": 1,
        "steps": 3,
        "data": {"name": "mnist", "source": "embedded", "sha256": "d" * 64},
        "versions": {"torch": "2.99.1+cpu"},
        "commit": "c0ffee" * 6,
        "command": "train.py compare --devices 2",
        "repeats": 5,
        "warm_up_steps": 20,
        "reference": "raw_ddp (own launcher)",
        "equal": all(
            other["status"] != "failed" and (other.get("comparison") or {"met": True})["met"] for other in others
        ),
        "engines": [make_engine("raw_ddp", variant="own launcher") | {"comparison": None}, *others],
    }


def absent(name: str, status: str, reason: str, install: str | None = None) -> dict[str, Any]:
    found = {"name": name, "variant": None, "world_size": None, "status": status}
    return found | {"reason": reason, "install": install}


def different(name: str = "parameter_server") -> dict[str, Any]:
    first = {"step": 7, "what": "weights", "tensor": "fc.weight", "rank": 0, "by": 1e-5, "text": "step 7: fc.weight"}
    checks = {"met": False, "weights": False, "loss": False, "test": None, "largest_difference": 0.0125}
    found = make_engine(name, expected="rounding", first_difference=first, **checks)
    return found | {"loss": [2.0, 1.0, 1.6], "weights_sha256": ["aa" * 32, "bb" * 32]}


def close(name: str = "single") -> dict[str, Any]:
    checks = {"weights": False, "loss": False, "largest_difference": 3.1e-7}
    return make_engine(name, expected="1e-05 relative", **checks) | {"world_size": 1, "loss": [2.0, 1.0, 1.5 + 1e-15]}


def write(tmp_path: Path, comparison: dict[str, Any]) -> Page:
    write_comparison(tmp_path / "comparison.html", comparison)
    page = Page((tmp_path / "comparison.html").read_text(encoding="utf-8"))
    assert page.balanced
    return page


def cells(page: Page, name: str) -> dict[str, dict[str, str]]:
    """A table's cells by its row's and its column's name."""
    tables: dict[str, list[list[str]]] = {}
    for element in page.elements:
        if element["attrs"].get("role") == "region":
            rows = tables.setdefault(element["attrs"]["aria-label"], [])
        elif element["tag"] == "tr":
            rows.append([])
        elif element["tag"] in ("th", "td"):
            rows[-1].append(element["text"])
    (_, *heads), *found = tables[name]
    return {first: dict(zip(heads, rest, strict=True)) for first, *rest in found}


def headline(page: Page) -> str:
    return page.find("h1")[0]["text"]


def lines(comparison: dict[str, Any], width: int = 120) -> list[str]:
    return text_of(comparison, width=width, color=False).splitlines()
