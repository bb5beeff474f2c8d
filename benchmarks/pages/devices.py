"""The whole training on 1 to N devices: one table of what was measured, predicted and published."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.pages import Part
from lit_mnist.report.formats import MISSING, SPACE, count, duration, number, plural, size
from lit_mnist.report.table import Cell, Column, Table, spread_cell

Row = Mapping[str, Any]

PREDICTION = (
    "A prediction takes the computing time per sample of the one measured device, and adds the communication at the "
    "bandwidth and latency of a network, which are assumed. The time to handle messages and to wait is not included, "
    "and a smaller batch is assumed to cost as much for each sample. For the lower bound, all buckets of gradients but "
    "the last overlap with the backward pass as far as it is long enough; for the upper bound, none does. A parameter "
    "server overlaps nothing. DataParallel is not predicted, since its threads are not modeled."
)
_BUSY = 0.1  # the share of the cores' time from which other programs are mentioned


def devices_parts(topic: Row) -> list[Part]:
    """Returns the parts of the section; `topic` is the topic's entry of `bench.json`."""
    found = topic["devices"]
    parts = [Part("text", subject(found)), Part("table", devices_table(topic), "Whole training")]
    if found["published"]:
        parts.append(Part("note", f"Published: {found['published']['source']}."))
    if found["predicted"]:
        method = (PREDICTION, _networks(found), _buckets(found["gradient"]))
        rate = f"One device takes {duration(found['seconds_per_sample'])} for a sample."
        parts.append(Part("method", " ".join(filter(None, (*method, rate)))))
    return parts


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
        Column("Source", "source", "word"),
        Column(title, title.lower(), "num"),
        Column("Speed-up", "speed-up", "num"),
    ]
    published = found["published"]["rows"] if found["published"] else []
    rows: list[tuple[Row, Sequence[Cell]]] = [
        *((row, _measured(row)) for row in found["measured"]),
        *((row, _predicted(row)) for row in found["predicted"]),
        *((row, _published(row)) for row in published),
    ]
    engines = list(dict.fromkeys(row["engine"] for row, _ in rows))
    rows.sort(key=lambda each: (each[0]["devices"], engines.index(each[0]["engine"])))
    return Table(columns, [[Cell(row["engine"]), Cell(count(row["devices"])), *cells] for row, cells in rows])


def _measured(row: Row) -> Sequence[Cell]:
    source = "measured, shared cores" if row["shares_cores"] else "measured"
    return Cell(source), spread_cell(row["seconds"], duration), spread_cell(row["speed_up"], _times)


def _predicted(row: Row) -> Sequence[Cell]:
    if "refused" in row:
        return Cell("cannot be run", below=row["refused"]), Cell(MISSING), Cell(MISSING)
    network = Cell(f"predicted: {row['network']}", "muted")
    return network, _range(row["seconds"], duration), _range(row["speed_up"], _times)


def _published(row: Row) -> Sequence[Cell]:
    shown = Cell(row["said"]) if row["speed_up"] is None else Cell(_times(row["speed_up"]), below=row["said"])
    return Cell("published"), Cell(MISSING), shown


def _range(bounds: Mapping[str, float], write: Callable[[object], str]) -> Cell:
    """Returns both bounds, or one if they read the same."""
    return Cell(" to ".join(dict.fromkeys(write(bounds[name]) for name in ("from", "to"))), "muted")


def _networks(found: Row) -> str:
    networks = dict.fromkeys(
        f"{row['network']}: {number(row['bandwidth_bytes_per_s'] / 1e6)} MB/s each way, "
        f"{number(1e6 * row['latency_s'])} µs"
        for row in found["predicted"]
        if "refused" not in row
    )
    devices = "GPUs like this one, in one machine" if found["kind"] == "cuda" else "machines like this one"
    return f"The predictions are for {devices}. Assumed are {'; '.join(networks)}." if networks else ""


def _buckets(gradient: Row) -> str:
    sizes = gradient["buckets"]
    whole = f"{count(gradient['parameters'])} parameters, {size(gradient['gradient_bytes'])}"
    return (
        f"The gradients ({whole} in float32) are sent in {plural(len(sizes), 'bucket')}, the last of "
        f"{size(sizes[-1])}; {plural(gradient['batch_norms'], 'batch norm')} communicate twice each."
    )


def _times(value: object) -> str:
    return number(value, 3)
