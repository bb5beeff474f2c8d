"""The curves of a run, one of each logged metric, and the report of a run with the user's module."""

from __future__ import annotations

import math
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from lit_mnist.report.formats import number, percent
from lit_mnist.report.html import write_page
from lit_mnist.report.plot import STYLES, Axis, Plot, Point, Series, linear_axis, loss_axis, step_axis

History = Sequence[Mapping[str, float]]
_MAX_EPOCHS = 30  # more dotted lines would be too close
_SPLITS = {"train": "train", "val": "valid", "valid": "valid", "validation": "valid"}
# Of the run folder. A callback may write files of these kinds, of at most this size together, which the page shows.
_IMAGES, _KINDS, _MAX_BYTES = "images", {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg"}, 20_000_000
_SHARE = "accuracy"  # shown in percent
_NAME = re.compile(r"(?:(train|val|valid|validation)[_/])?(.+?)(?:_(step|epoch))?")


def write_metrics_report(path: Path, *, result: Mapping[str, Any], history: History) -> None:
    """Writes the report of a run atomically.

    Args:
        path: The file to write; its folder must exist.
        result: The content of `result.json`.
        history: The rows of `metrics.csv` in order.

    Raises:
        OSError: The file cannot be written.
    """
    plots, images = metric_curves(history), _shown_images(path.parent / _IMAGES)
    write_page(path, "lit_mnist.report", "metrics.html.jinja", result=result, plots=plots, images=images)


def _shown_images(folder: Path) -> list[tuple[str, str]]:
    """Returns the name, without its ending, and the data URL of each image of a folder, in the order of the names."""
    shown, size = [], 0
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.suffix in _KINDS and (size := size + path.stat().st_size) <= _MAX_BYTES:
            shown.append(
                (path.stem, f"data:image/{_KINDS[path.suffix]};base64,{b64encode(path.read_bytes()).decode()}")
            )
    return shown


def metric_curves(history: History) -> list[Plot]:
    """Returns a plot for each logged metric; those of training and validation share one."""
    groups: dict[str, list[Series]] = {}
    for name in dict.fromkeys(key for row in history for key in row if key not in {"step", "epoch"}):
        found = _NAME.fullmatch(name)
        if not found or not (drawn := points_of(history, name)):
            continue
        split, title, kind = found.groups()
        group = groups.setdefault(title, [])
        label = " ".join(filter(None, [split or title, kind]))
        style = _SPLITS.get(split or "", STYLES[len(group) % len(STYLES)])
        if any(series.style == style for series in group):
            style = STYLES[len(group) % len(STYLES)]
        write = percent if title == _SHARE else number
        group.append(Series(style, label, write(drawn[-1][1]), drawn))
    x = step_axis(max((x for group in groups.values() for series in group for x, _ in series.points), default=0.0))
    rules = [edge for edge in epoch_ends(history) if edge < x.high]
    return [replace(_plot(title, series, x), rules=rules) for title, series in groups.items()]


def _plot(title: str, series: list[Series], x: Axis) -> Plot:
    values = [y for each in series for _, y in each.points]
    if title == _SHARE:
        # Leave room below values that are nearly equal, since there is none above 100 %.
        best = max(values)
        y = linear_axis([*values, best - 0.01 if best >= 0.01 else best + 0.01], least=0.01)
        return Plot(title, "", series, x, y, percent=True)
    y = loss_axis(values) if "loss" in title else linear_axis(values, least=0.1 * max(map(abs, values)) or 1.0)
    return Plot(title, "logarithmic" if y.log else "", series, x, y)


def points_of(history: History, name: str) -> list[Point]:
    """Returns the finite values of a metric over the optimizer steps."""
    pairs = ((row.get("step"), row.get(name)) for row in history)
    return [(float(x), float(y)) for x, y in pairs if x is not None and y is not None and math.isfinite(x + y)]


def epoch_ends(history: History) -> list[float]:
    """Returns the last logged step of each epoch except the last one; nothing if there are too many."""
    ends = [x for (x, epoch), (_, following) in pairwise(points_of(history, "epoch")) if following > epoch]
    return ends if len(ends) <= _MAX_EPOCHS else []
