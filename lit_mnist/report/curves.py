"""The learning curves of a run: loss, score and learning rate over the optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from lit_mnist.experiment import ModelSettings
from lit_mnist.report.formats import number, percent, short
from lit_mnist.report.plot import MAX_POINTS, Axis, Plot, Point, Series, linear_axis, loss_axis, step_axis
from lit_mnist.training.schedule import lr_factor

History = Sequence[Mapping[str, float]]
_MAX_EPOCHS = 30  # more dotted lines would be too close


def curves(history: History, result: Mapping[str, Any]) -> list[Plot]:
    """Returns the plots of loss, score and learning rate; a plot without values is omitted.

    Args:
        history: The rows of `metrics.csv` in order; a value that is absent or not finite is not drawn.
        result: The content of `result.json`.
    """
    unknown = Axis(0.0, 1.0, ())
    plots = [
        plot
        for plot in (
            _loss_plot(history, unknown),
            _score_plot(history, result.get("steps"), result.get("test") or {}, unknown),
            _lr_plot(result, unknown),
        )
        if plot
    ]
    last = max((x for plot in plots for series in plot.series for x, _ in series.points), default=0.0)
    steps = step_axis(last)
    rules = [edge for edge in epoch_ends(history) if edge < steps.high]
    return [replace(plot, x=steps, rules=rules) for plot in plots]


def _loss_plot(history: History, x: Axis) -> Plot | None:
    series = [
        Series(style, name, number(points[-1][1]), points)
        for style, name, key in (("train", "train", "train_loss"), ("valid", "validation", "val_loss"))
        if (points := points_of(history, key))
    ]
    if not series:
        return None
    y = loss_axis([value for one in series for _, value in one.points])
    return Plot("Loss", "cross-entropy in nats" + ", logarithmic" * y.log, series, x, y)


def _score_plot(history: History, steps: int | None, test: Mapping[str, Any], x: Axis) -> Plot | None:
    """Returns the validation accuracy or mean IoU, with the test score as a mark at the last step."""
    is_segmentation = "mean_iou" in test or bool(points_of(history, "val_mean_iou"))
    metric, title, unit = ("accuracy", "Accuracy", "share of images")
    if is_segmentation:
        metric, title, unit = ("mean_iou", "Mean IoU", "over the classes")
    series = []
    if points := points_of(history, f"val_{metric}"):
        series.append(Series("valid", "validation", percent(points[-1][1]), points))
    score = test.get(metric)
    if steps is not None and score is not None and math.isfinite(score):
        samples = None if is_segmentation else test.get("count")
        series.append(Series("test", "test, at the end", percent(score, samples), [(float(steps), float(score))]))
    if not series:
        return None
    values = [y for one in series for _, y in one.points]
    # Leave room below values that are nearly equal, since there is none above 100 %.
    best = max(values)
    y = linear_axis([*values, best - 0.01 if best >= 0.01 else best + 0.01], least=0.01)
    return Plot(title, unit, series, x, y, percent=True)


def _lr_plot(result: Mapping[str, Any], x: Axis) -> Plot | None:
    """Returns the learning rate of each step from the schedule, since only some are logged."""
    lrs = _scheduled_lrs(result)
    if not lrs:
        return None
    highest = max(y for _, y in lrs)
    y = linear_axis([0.0, highest], least=1e-12 if highest else 1.0, target=2)
    series = Series("rate", "highest", short(float(f"{highest:.4g}")), lrs)
    return Plot("Learning rate", "per step", [series], x, y, low=True)


def _scheduled_lrs(result: Mapping[str, Any]) -> list[Point]:
    """Returns at most `MAX_POINTS` evenly spread learning rates, including the first, the highest and the last."""
    train, model = result.get("train") or {}, (result.get("config") or {}).get("model") or {}
    steps, peak, schedule = result.get("steps"), train.get("lr"), model.get("schedule")
    if not steps or peak is None or schedule is None:
        return []
    settings = ModelSettings(schedule=schedule, warmup=model.get("warmup"))
    total = train.get("scheduled_steps") or steps
    lrs = [peak * lr_factor(settings, step, total) for step in range(steps)]
    stride = math.ceil(steps / (MAX_POINTS - 2))
    chosen = {*range(0, steps, stride), lrs.index(max(lrs)), steps - 1}
    return [(step + 1.0, lrs[step]) for step in sorted(chosen)]


def points_of(history: History, name: str) -> list[Point]:
    """Returns the finite values of a metric over the optimizer steps."""
    pairs = ((row.get("step"), row.get(name)) for row in history)
    return [(float(x), float(y)) for x, y in pairs if x is not None and y is not None and math.isfinite(x + y)]


def epoch_ends(history: History) -> list[float]:
    """Returns the last logged step of each epoch except the last one; nothing if there are too many."""
    ends = [x for (x, epoch), (_, following) in pairwise(points_of(history, "epoch")) if following > epoch]
    return ends if len(ends) <= _MAX_EPOCHS else []
