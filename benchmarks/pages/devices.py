"""The whole training on 1 to N devices, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.pages import Part
from lit_mnist.report.formats import SPACE, count, duration, number, plural
from lit_mnist.report.table import Cell, Column, Table, spread_cell

Row = Mapping[str, Any]

_BUSY = 0.1  # the share of the cores' time from which other programs are mentioned


def devices_parts(topic: Row) -> list[Part]:
    """Returns the parts of the section; `topic` is the topic's entry of `bench.json`."""
    found = topic["devices"]
    return [Part("text", subject(found)), Part("table", devices_table(topic), "Whole training")]


def subject(found: Row) -> str:
    """Describes the training, and the machine on which its steps were timed."""
    experiment = found["experiment"]
    data, model = experiment["data"], experiment["model"]
    per = "per device" if data["batch_per"] == "rank" else "over all devices"
    training = (
        f"{model['net']}, {plural(found['epochs'], 'epoch')} of {count(found['train_samples'])} samples of "
        f"{data['name']}, batch {count(data['batch_size'])} {per}"
    )
    machine = f"{count(found['present'])} x {found['device']}" if found["kind"] == "cuda" else "the processor"
    stand_in = f"; {found['stand_in']} stand in for the data" if found["stand_in"] else ""
    others = ""
    if found["elsewhere"] is not None and found["elsewhere"] >= _BUSY:
        others = (
            f" Other programs used up to {100 * found['elsewhere']:.0f}{SPACE}% of the cores: the times are too long, "
            "some more than others, so that the speed-ups are wrong."
        )
    return f"{training}, on {machine}{stand_in}.{others}"


def devices_table(topic: Row) -> Table:
    """Returns the table, for the page and for the terminal: by number of devices, then by engine."""
    found = topic["devices"]
    title = f"Time of {plural(found['epochs'], 'epoch')}"
    columns = [
        Column("Engine", "engine"),
        Column("Devices", "devices", "num"),
        Column(title, title.lower(), "num"),
        Column("Speed-up", "speed-up", "num"),
    ]
    engines = list(dict.fromkeys(row["engine"] for row in found["measured"]))
    rows = [
        [
            Cell(row["engine"]),
            Cell(count(row["devices"]), below="shared cores" if row["shares_cores"] else ""),
            spread_cell(row["seconds"], duration),
            spread_cell(row["speed_up"], _times),
        ]
        for row in sorted(found["measured"], key=lambda row: (row["devices"], engines.index(row["engine"])))
    ]
    return Table(columns, rows)


def _times(value: object) -> str:
    return number(value, 3)
