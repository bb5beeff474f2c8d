"""What the tests of the benchmark's pages share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from html_page import Page

from benchmarks.pages.page import write_bench


def bench_page(folder: Path, found: dict[str, Any]) -> Page:
    """Returns the page of a benchmark with a single topic, which has `found` and nothing else."""
    topic = {"title": "Topic", "repeats": 1, "rows": [], "ratios": [], "notes": []}
    machine = {"processor": "one", "cores": 2}
    write_bench(folder / "bench.html", {"machine": machine, "versions": {}, "topics": {"topic": topic | found}})
    page = Page((folder / "bench.html").read_text(encoding="utf-8"))
    assert page.balanced
    assert "None" not in page.text
    assert "nan" not in page.text
    return page
