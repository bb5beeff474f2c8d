"""The step over ranks and networks, measured and predicted, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.pages import Part
from lit_mnist.report.formats import MISSING, count, number
from lit_mnist.report.table import Cell, Column, Table


def growth_parts(topic: Mapping[str, Any]) -> list[Part]:
    """Returns the parts of the section; `topic` is the topic's entry of `bench.json`."""
    return [Part("table", _table(topic["growth"]), "Milliseconds of a step")]


def _table(links: list[Mapping[str, Any]]) -> Table:
    """Returns a row per link, network and variant, with the measured and the predicted steps."""
    ranks = sorted({step["ranks"] for link in links for step in link["steps"]})
    columns = [Column("Link"), Column("Network"), Column("Variant")]
    columns += [Column(f"{count(each)} ranks, measured (predicted)", style="num") for each in ranks]
    rows = []
    for link in links:
        found = {(step["net"], step["variant"], step["ranks"]): step for step in link["steps"]}
        title = f"{link['gbit_per_s']:g} Gbit/s, {link['latency_ms']:g} ms"
        for net, variant in dict.fromkeys((step["net"], step["variant"]) for step in link["steps"]):
            steps = [found.get((net, variant, each)) for each in ranks]
            rows.append([Cell(title), Cell(net), Cell(variant), *(Cell(_both(step)) for step in steps)])
    return Table(columns, rows)


def _both(step: Mapping[str, Any] | None) -> str:
    if step is None:
        return MISSING
    predicted = "" if step["predicted_ms"] is None else f" ({number(step['predicted_ms'], 3)})"
    return f"{number(step['measured_ms'], 3)}{predicted}"
