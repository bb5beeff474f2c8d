"""Loss, accuracy and learning rate over the optimizer steps, drawn as inline SVG.

The images stretch to the page's width while text and line widths keep their size: positions are percentages, and
only the lines lie in an inner image that is scaled unevenly. Colours come from the page's style sheet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lit_mnist.experiment import ModelSettings
from lit_mnist.report.axes import Axis, linear_axis, log_axis, step_axis
from lit_mnist.report.formats import count, number, percent, short, text
from lit_mnist.training.schedule import lr_factor

Point = tuple[float, float]

MOST_POINTS = 400  # more than a screen can show: longer curves are drawn as means with their range
MOST_DOTS = 24
GRID = 1000  # units of the inner image
_ACCURACY = ("Accuracy", "share of images")


@dataclass(frozen=True)
class Series:
    """One curve: its style class, its name and value for the legend, and its points in drawing order."""

    style: str
    name: str
    value: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Plot:
    """One image: what it shows, its series, its vertical axis and the labels of that axis' ticks."""

    title: str
    unit: str
    series: Sequence[Series]
    axis: Axis
    labels: Sequence[str]
    height: str = "tall"


def curves(history: Sequence[Mapping[str, float]], result: Mapping[str, Any]) -> str:
    """Returns the section of the learning curves.

    Args:
        history: The logged rows in order: `step` with some of `epoch`, `train_loss`, `val_loss` and `val_accuracy`
            or, of scenes, `val_mean_iou`. What is absent or not finite is not drawn.
        result: The run's result; read are `steps`, the schedule of the learning rate, and the test's accuracy or mean
            IoU, the mark at the end.

    Returns:
        HTML; a sentence takes the place of the images where nothing was logged.
    """
    test = result.get("test") or {}
    plots = [loss_plot(history), score_plot(history, result.get("steps"), test), lr_plot(result)]
    drawn = [plot for plot in plots if plot is not None]
    if not drawn:
        return "<p class=quiet>No metrics were logged.</p>"
    steps = step_axis(max(x for plot in drawn for series in plot.series for x, _ in series.points))
    epochs = [edge for edge in epoch_edges(history) if edge < steps.high]
    note = "<p class=quiet>Dotted: the end of an epoch.</p>" if epochs else ""
    return "".join(figure(plot, steps, epochs) for plot in drawn) + note


def loss_plot(history: Sequence[Mapping[str, float]]) -> Plot | None:
    """Returns training and validation loss, on a logarithmic axis where they span more than a factor of ten."""
    train, valid = points(history, "train_loss"), points(history, "val_loss")
    series = [
        Series(style, name, number(values[-1][1]), values)
        for style, name, values in (("train", "train", train), ("valid", "validation", valid))
        if values
    ]
    heights = [y for _, y in (*train, *valid)]
    if not heights:
        return None
    log = min(heights) > 0 and max(heights) / min(heights) >= 10
    axis = log_axis(heights) if log else linear_axis(heights, least=0.1 * max(map(abs, heights)) or 1.0)
    unit = "cross-entropy in nats" + (", logarithmic" if log else "")
    return Plot("Loss", unit, series, axis, axis.tick_labels())


def score_plot(history: Sequence[Mapping[str, float]], steps: int | None, test: Mapping[str, Any]) -> Plot | None:
    """Returns the validation accuracy or mean IoU, and the final test's as one mark at the last step."""
    is_segmentation = "mean_iou" in test or bool(points(history, "val_mean_iou"))
    metric, title, unit = ("mean_iou", "Mean IoU", "over the classes") if is_segmentation else ("accuracy", *_ACCURACY)
    series = []
    if valid := points(history, f"val_{metric}"):
        series.append(Series("valid", "validation", percent(valid[-1][1]), valid))
    score = test.get(metric)
    if steps is not None and score is not None and math.isfinite(score):
        mark = [(float(steps), float(score))]
        samples = None if is_segmentation else test.get("count")
        series.append(Series("test", "test, at the end", percent(score, samples), mark))
    if not series:
        return None
    heights = [y for one in series for _, y in one.points]
    # values that are nearly equal get room below them, since there is none above 100 %
    best = max(heights)
    axis = linear_axis([*heights, best - 0.01 if best >= 0.01 else best + 0.01], least=0.01)
    return Plot(title, unit, series, axis, axis.tick_labels(percent=True))


def lr_plot(result: Mapping[str, Any]) -> Plot | None:
    """Returns the learning rate of each step, from zero: the schedule itself, of which only a few rates are logged."""
    lrs = scheduled_lrs(result)
    if not lrs:
        return None
    highest = max(y for _, y in lrs)
    axis = linear_axis([0.0, highest], least=1e-12 if highest else 1.0, target=2)
    series = Series("rate", "highest", short(float(f"{highest:.4g}")), lrs)
    return Plot("Learning rate", "per step", [series], axis, axis.tick_labels(), height="low")


def scheduled_lrs(result: Mapping[str, Any]) -> list[Point]:
    """Returns the learning rate that the schedule gives to the steps that were made, at `MOST_POINTS` of them at most.

    Of a long schedule they are spread evenly; the first, the highest and the last are always among them.
    """
    train, model = result.get("train") or {}, (result.get("config") or {}).get("model") or {}
    made, peak, schedule = result.get("steps"), train.get("lr"), model.get("schedule")
    if not made or peak is None or schedule is None:
        return []
    settings = ModelSettings(schedule=schedule, warmup=model.get("warmup"))
    total = train.get("scheduled_steps") or made
    lrs = [peak * lr_factor(settings, step, total) for step in range(made)]
    stride = math.ceil(made / (MOST_POINTS - 2))
    chosen = {*range(0, made, stride), lrs.index(max(lrs)), made - 1}
    return [(step + 1.0, lrs[step]) for step in sorted(chosen)]


def points(history: Sequence[Mapping[str, float]], name: str) -> list[Point]:
    """Returns the finite values of one metric with their steps, in the order they were logged."""
    pairs = ((row.get("step"), row.get(name)) for row in history)
    return [(float(x), float(y)) for x, y in pairs if x is not None and y is not None and math.isfinite(x + y)]


def epoch_edges(history: Sequence[Mapping[str, float]]) -> list[float]:
    """Returns the last logged step of every epoch but the last one; none where they would lie too close."""
    rows = points(history, "epoch")
    edges = [x for (x, epoch), (_, following) in pairwise(rows) if following > epoch]
    return edges if len(edges) <= 30 else []


def figure(plot: Plot, steps: Axis, epochs: Sequence[float]) -> str:
    """Returns one image with its title, legend, axes and curves."""
    keys = "".join(
        f'<span class="key {one.style}"><i></i>{text(one.name)} <b>{text(one.value)}</b></span>' for one in plot.series
    )
    summary = f"{plot.title} over {count(steps.high)} steps: " + ", ".join(f"{s.name} {s.value}" for s in plot.series)
    return (
        f"<figure class=plot><figcaption><h3>{text(plot.title)}</h3> <span class=unit>{text(plot.unit)}</span>"
        f"<span class=legend>{keys}</span></figcaption>"
        f'<div class="frame {plot.height}"><svg role=img aria-label="{text(summary)}" width="100%" height="100%">'
        f"{grid(plot, steps, epochs)}{''.join(curve(one, steps, plot.axis) for one in plot.series)}"
        "</svg></div></figure>"
    )


def grid(plot: Plot, steps: Axis, epochs: Sequence[float]) -> str:
    """Returns rules and labels of both axes."""
    parts = []
    for tick, label in zip(plot.axis.ticks, plot.labels, strict=True):
        y = place(1 - plot.axis.share(tick))
        parts.append(f'<line class=rule x1="0" x2="100%" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class=y x="0" y="{y}" dx="-10" dy=".35em">{label}</text>')
    for edge in epochs:
        x = place(steps.share(edge))
        parts.append(f'<line class=epoch x1="{x}" x2="{x}" y1="0" y2="100%"/>')
    for tick in steps.ticks:
        label = f"{short(tick / 1000)}k" if steps.high >= 20_000 and tick else f"{tick:,.0f}"
        parts.append(f'<text class=x x="{place(steps.share(tick))}" y="100%" dy="1.7em">{label}</text>')
    parts.append('<text class=name x="100%" y="100%" dy="3.1em">optimizer step</text>')
    return "".join(parts)


def curve(series: Series, steps: Axis, axis: Axis) -> str:
    """Returns a series as a line, as dots where it has few points, and as a diamond where it is the test's mark."""
    if series.style == "test":
        ((x, y),) = series.points
        return (
            f'<svg class="mark test" x="{place(steps.share(x))}" y="{place(1 - axis.share(y))}">'
            f'<path d="M-7 0 0-7 7 0 0 7Z"><title>step {count(x)}: {series.value}</title></path></svg>'
        )
    parts = []
    if len(series.points) > 1:
        rows = thin(series.points)
        parts.append(f'<svg viewBox="0 0 {GRID} {GRID}" preserveAspectRatio="none" width="100%" height="100%">')
        if len(rows) < len(series.points):
            upper = [(x, high) for x, _, _, high in rows]
            lower = [(x, low) for x, low, _, _ in reversed(rows)]
            parts.append(f'<polygon class="band {series.style}" points="{path([*upper, *lower], steps, axis)}"/>')
        line = path([(x, mean) for x, _, mean, _ in rows], steps, axis)
        parts.append(f'<polyline class="line {series.style}" points="{line}"/></svg>')
    if len(series.points) <= MOST_DOTS:
        parts.extend(
            f'<circle class="dot {series.style}" cx="{place(steps.share(x))}" cy="{place(1 - axis.share(y))}" r="3.5">'
            f"<title>step {count(x)}: {short(y)}</title></circle>"
            for x, y in series.points
        )
    return "".join(parts)


def thin(series: Sequence[Point]) -> list[tuple[float, float, float, float]]:
    """Returns a curve as at most `MOST_POINTS` rows (step, lowest, mean, highest), each over consecutive points."""
    width = math.ceil(len(series) / MOST_POINTS)
    groups = [series[start : start + width] for start in range(0, len(series), width)]
    return [
        (
            sum(x for x, _ in group) / len(group),
            min(y for _, y in group),
            sum(y for _, y in group) / len(group),
            max(y for _, y in group),
        )
        for group in groups
    ]


def path(line: Sequence[Point], steps: Axis, axis: Axis) -> str:
    """Returns points in the units of the inner image, y downwards."""
    return " ".join(f"{GRID * steps.share(x):.1f},{GRID * (1 - axis.share(y)):.1f}" for x, y in line)


def place(share: float) -> str:
    """Returns a share of the image's width or height as a percentage."""
    return f"{100 * share:.2f}%"
