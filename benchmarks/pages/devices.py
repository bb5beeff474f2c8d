"""The whole training on 1 to N devices: one table of what was measured, predicted and published, each said to be so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lit_mnist.report.comparison import page_table
from lit_mnist.report.comparison_rows import Cell, Column, Grid
from lit_mnist.report.comparison_verdict import mappings, part, plain
from lit_mnist.report.formats import MISSING, SPACE, count, duration, finite, number, size, text

Row = Mapping[str, Any]
Write = Callable[[float | None], str]
PREDICTION = (
    "A prediction takes what the one measured device computes for a sample, and adds what the devices share at a "
    "network's bandwidth and latency, which are assumed. Nothing is added for handling messages or for waiting, and a "
    "smaller batch is taken to cost as much for each sample. Of its two figures one hides all buckets of gradients but "
    "the last behind the backward pass, as far as that has time for them, and the other none. A parameter server hides "
    "nothing. DataParallel is not predicted: the model knows nothing of its threads."
)
# Of the cores' time, from which on it is said that others took it.
_BUSY = 0.1


def devices_section(topic: Row) -> str:
    """Returns the section's content as HTML.

    Args:
        topic: The topic's entry of `bench.json`, whose `devices` has `measured`, `predicted` and `published`. What is
            absent or None is an en dash.
    """
    found = part(topic, "devices")
    if not mappings(found.get("measured")):
        return "<p class=quiet>No training was measured.</p>"
    rate = finite(found.get("seconds_per_sample"))
    told = [*_networks(found), _buckets(part(found, "gradient")), f"A sample takes one device {duration(rate)}."]
    source = part(found, "published").get("source")
    published = f"<p class=quiet>Published: {text(source)}.</p>" if source else ""
    predicted = mappings(found.get("predicted"))
    method = f'<p class="quiet method">{PREDICTION} {text(" ".join(each for each in told if each))}</p>'
    return (
        f"<p>{text(subject(found))}</p>{page_table('Whole training', devices_grid(topic))}"
        f"{published}{method if predicted else ''}"
    )


def subject(found: Row) -> str:
    """Returns in words which training it is, and on what the steps of it were timed."""
    experiment = part(found, "experiment")
    data, net = part(experiment, "data"), part(experiment, "model").get("net")
    batch = finite(data.get("batch_size"))
    per = "per device" if data.get("batch_per") == "rank" else "over all devices"
    samples = f"{count(finite(found.get('train_samples')))} samples of {plain(data.get('name'))}"
    stand_in = found.get("stand_in")
    read = f"; {plain(stand_in)} stand in for the data" if stand_in else ""
    gpus = f"{count(finite(found.get('present')))} x {plain(found.get('device'))}"
    on = gpus if found.get("kind") == "cuda" else "the processor"
    busy = finite(found.get("elsewhere"))
    others = (
        f" Other programs took up to {100 * busy:.0f}{SPACE}% of the cores meanwhile: the times are too long, some "
        "more than others, and the speed-ups therefore wrong."
        if busy is not None and busy >= _BUSY
        else ""
    )
    return f"{plain(net)}, {_epochs(found)} of {samples}, batch {count(batch)} {per}, on {on}{read}.{others}"


def devices_grid(topic: Row) -> Grid:
    """Returns the table, for the page and for the terminal: by number of devices, then by engine."""
    found = part(topic, "devices")
    title = f"Time of {_epochs(found)}"
    columns = [
        Column("Engine", "engine"),
        Column("Devices", "devices", "figure"),
        Column("How it is known", "known how", "word"),
        Column(title, title.lower(), "figure"),
        Column("Speed-up", "speed-up", "figure"),
    ]
    rows = [
        *map(_measured, mappings(found.get("measured"))),
        *map(_predicted, mappings(found.get("predicted"))),
        *map(_published, mappings(part(found, "published").get("rows"))),
    ]
    engines = list(dict.fromkeys(engine for _, engine, _ in rows))
    rows.sort(key=lambda row: (row[0], engines.index(row[1])))
    return Grid(columns, [cells for _, _, cells in rows])


def _measured(row: Row) -> tuple[float, str, list[Cell]]:
    seconds, speed_up = part(row, "seconds"), part(row, "speed_up")
    how = "measured, shared cores" if row.get("shares_cores") else "measured"
    return _cells(row, Cell(how), _median(seconds, duration), _median(speed_up, _times))


def _median(spread: Row, write: Write) -> Cell:
    """Returns a median, on the page above what it lies between."""
    between = _between(spread, "lowest", "highest", write)
    return Cell(write(finite(spread.get("median"))), below=between if " to " in between else "")


def _predicted(row: Row) -> tuple[float, str, list[Cell]]:
    if row.get("refused"):
        return _cells(row, Cell("cannot be run", below=plain(row["refused"])), Cell(MISSING), Cell(MISSING))
    return _cells(
        row,
        Cell(f"predicted: {plain(row.get('network'))}", "soft"),
        Cell(_between(part(row, "seconds"), "from", "to", duration) or MISSING, "soft"),
        Cell(_between(part(row, "speed_up"), "from", "to", _times) or MISSING, "soft"),
    )


def _published(row: Row) -> tuple[float, str, list[Cell]]:
    speed_up = finite(row.get("speed_up"))
    said = plain(row.get("said"))
    shown = Cell(said) if speed_up is None else Cell(_times(speed_up), below=said)
    return _cells(row, Cell("published"), Cell(MISSING), shown)


def _cells(row: Row, *cells: Cell) -> tuple[float, str, list[Cell]]:
    devices, engine = finite(row.get("devices")), plain(row.get("engine"))
    return devices or 0.0, engine, [Cell(engine), Cell(count(devices)), *cells]


def _between(bounds: Row, low: str, high: str, write: Write) -> str:
    """Returns both bounds, one where they read alike, or nothing where there are none."""
    told = [write(value) for value in (finite(bounds.get(low)), finite(bounds.get(high))) if value is not None]
    return " to ".join(dict.fromkeys(told))


def _networks(found: Row) -> list[str]:
    told = dict.fromkeys(
        f"{plain(row.get('network'))}: {number((finite(row.get('bandwidth_bytes_per_s')) or 0) / 1e6)} MB/s each way, "
        f"{number(1e6 * (finite(row.get('latency_s')) or 0))} µs"
        for row in mappings(found.get("predicted"))
        if not row.get("refused")
    )
    who = "GPUs like this one, in one machine" if found.get("kind") == "cuda" else "machines like this one"
    return [f"Predicted are {who}. Assumed are {'; '.join(told)}."] if told else []


def _buckets(gradient: Row) -> str:
    sizes = gradient.get("buckets") or []
    if not sizes:
        return ""
    whole = f"{count(finite(gradient.get('parameters')))} parameters, {size(finite(gradient.get('gradient_bytes')))}"
    return (
        f"The gradients ({whole} in float32) travel in {len(sizes)} bucket{'s' * (len(sizes) != 1)}, the last of "
        f"{size(finite(sizes[-1]))}; {count(finite(gradient.get('batch_norms')))} batch norms each share figures twice."
    )


def _epochs(found: Row) -> str:
    epochs = finite(found.get("epochs"))
    return f"{count(epochs)} epoch{'s' * (epochs != 1)}"


def _times(value: float | None) -> str:
    return number(value, 3)
