"""The run as one page, `report.html`: what ran, its curves, its confusion matrix and the digits it got wrong."""

import base64
import csv
import io
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from jinja2 import Environment
from PIL import Image

Points = tuple[list[float], list[float]]

# Matplotlib writes the color of the text as this number, which the page replaces by that of the light or dark theme.
_INK = "#123456"
_COLORS = {"train": "#d97706", "val": "#3b82f6"}
_METRIC = re.compile(r"(?:(?P<stage>train|val|test)[_/])?(?P<name>.+?)(?:_step|_epoch)?")


class Mistake(NamedTuple):
    """A misclassified image: its pixels, uint8 [height, width], and what the network said.

    `probability` is that of the predicted class, from 0 to 1.
    """

    image: npt.NDArray[np.uint8]
    target: int
    predicted: int
    probability: float


def write_report(folder: Path, result: Mapping[str, Any], mistakes: list[Mistake]) -> None:
    """Writes `report.html`, which contains all that it shows.

    Args:
        folder: The run folder. The curves are those of its `metrics.csv`, if there is one, and of the runs that it
            has resumed.
        result: The content of `result.json`. What it does not contain is left out.
        mistakes: The misclassified images.
    """
    test = result.get("test") or {}
    confusion = test.get("confusion") or []
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(_PAGE)
    text = page.render(
        name=folder.resolve().name,
        summary=_summary(result, test),
        curves={name: _draw(lines) for name, lines in read_curves(folder).items()},
        confusion=[[(count, 100 * count / max(sum(row), 1)) for count in row] for row in confusion],
        per_class=test.get("per_class") or [],
        mistakes=[(_png(mistake.image), mistake) for mistake in mistakes],
        config=json.dumps(result.get("config") or {}, indent=2),
    )
    (folder / "report.html").write_text(text, encoding="utf-8")


def read_curves(folder: Path) -> dict[str, dict[str, Points]]:
    """Reads the metrics that Lightning's CSVLogger has written into a run folder.

    `train_loss` and `val_loss` are two lines of one metric. The metrics of a test are left out: they are single points.

    Returns:
        For each metric, its steps and values for `train`, for `val`, or for the column's name; empty without a file.
    """
    curves: dict[str, dict[str, Points]] = {}
    rows: list[dict[str, str]] = []
    resumed = sorted(folder.glob("metrics-*.csv"), key=lambda path: (len(path.name), path.name))
    for path in [*resumed, *folder.glob("metrics.csv")]:
        with path.open(newline="") as file:
            rows += csv.DictReader(file)
    columns = {name for row in rows for name in row} - {"epoch", "step"}
    for column in sorted(columns, key=lambda each: (each.startswith("lr-"), each)):
        match = _METRIC.fullmatch(column)
        if not match or match["stage"] == "test":
            continue
        steps: list[float] = []
        values: list[float] = []
        for row in rows:
            with suppress(TypeError, ValueError):  # a blank, or text
                step, value = float(row["step"]), float(row.get(column, ""))
                steps.append(step)
                values.append(value)
        if values:
            curves.setdefault(match["name"], {})[match["stage"] or column] = steps, values
    return curves


def _summary(result: Mapping[str, Any], test: Mapping[str, Any]) -> dict[str, str]:
    train, data = result.get("train") or {}, result.get("data") or {}
    metrics: dict[str, Any] = {f"test {name}": value for name, value in test.items() if isinstance(value, int | float)}
    if "accuracy" in test:
        metrics["test accuracy"] = f"{test['accuracy']:.2%}"
    values = {
        **metrics,
        "engine": result.get("engine"),
        "ranks": result.get("world_size"),
        "device": result.get("device"),
        "precision": result.get("precision"),
        "data": data.get("name"),
        "epochs": result.get("epochs"),
        "steps": result.get("steps"),
        "seconds": train.get("seconds"),
        "images/s": train.get("images_per_s"),
        "last training loss": train.get("loss"),
        "evaluation": None if result.get("exact", True) else "; ".join(map(str, result.get("exact_reasons", []))),
        "versions": ", ".join(f"{name} {version}" for name, version in (result.get("versions") or {}).items()),
        "commit": result.get("commit"),
        "weights_sha256": result.get("weights_sha256"),
        "command": result.get("command"),
    }
    return {
        name: f"{value:,.5g}" if isinstance(value, float) and abs(value) < 1e5 else str(value)
        for name, value in values.items()
        if value not in (None, "")
    }


def _draw(lines: Mapping[str, Points]) -> str:
    """Returns an SVG of the lines over the optimizer steps."""
    import matplotlib  # takes a second
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    style: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "lit_mnist", "font.size": 9}
    style |= dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK)
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(4.8, 2.7), layout="constrained")
        axes = figure.add_subplot()
        for name, (steps, values) in lines.items():
            marker = "." if len(values) < 40 else ""
            axes.plot(steps, values, color=_COLORS.get(name, "#059669"), marker=marker, linewidth=1.3, label=name)
        axes.set_xlabel("optimizer step")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.grid(alpha=0.15, color=_INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        file = io.StringIO()
        figure.savefig(
            file, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    svg = file.getvalue()
    return svg[svg.index("<svg") :].replace(_INK, "currentColor")


def _png(image: npt.NDArray[np.uint8]) -> str:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ name }}</title>
<style>
:root { color-scheme: light dark; --line: #8884; --good: #3b82f6; --bad: #ef4444 }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 0 auto; padding: 1rem }
h1, h2 { line-height: 1.2; overflow-wrap: anywhere }
h2 { margin: 2.5rem 0 .5rem; font-size: 1.2rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
.summary { width: 100% }
.summary th { text-align: left; font-weight: normal; opacity: .7; vertical-align: top; padding: .2rem 1rem .2rem 0 }
.summary td { overflow-wrap: anywhere; width: 80%; padding: .2rem 0 }
.summary tr { border-bottom: 1px solid var(--line) }
.curves, .mistakes { display: grid; gap: 1rem }
.curves { grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)) }
.mistakes { grid-template-columns: repeat(auto-fill, minmax(6.5rem, 1fr)) }
.scroll { overflow-x: auto }
.confusion { font-size: .8rem }
.confusion td, .confusion th { padding: .3rem; min-width: 1.3rem; text-align: right }
.confusion tbody td { background: color-mix(in srgb, var(--bad) calc(var(--share) * 8%), transparent) }
.confusion tbody td.right { background: color-mix(in srgb, var(--good) calc(var(--share) * .6%), transparent) }
.bars td, .bars th { padding: .1rem .6rem .1rem 0 }
.bars td:last-child { width: 100% }
.bars div { background: var(--good); height: .8rem }
svg { width: 100%; height: auto }
figure { margin: 0 }
figcaption { font-size: .85rem; text-align: center }
.mistakes img { width: 100%; image-rendering: pixelated; border: 1px solid var(--line) }
pre { overflow-x: auto; font-size: .8rem }
</style>
</head>
<body>
<h1>{{ name }}</h1>
<table class="summary">
{% for key, value in summary.items() %}
<tr><th>{{ key }}</th><td>{{ value }}</td></tr>
{% endfor %}
</table>
{% if curves %}
<h2>Curves</h2>
<div class="curves">
{% for metric, svg in curves.items() %}
<figure><figcaption>{{ metric }}</figcaption>{{ svg | safe }}</figure>
{% endfor %}
</div>
{% endif %}
{% if confusion %}
<h2>Confusion matrix</h2>
<p>A row is a target class, a column a predicted class.</p>
<div class="scroll"><table class="confusion">
<thead><tr><th></th>{% for _ in confusion %}<th>{{ loop.index0 }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in confusion %}{% set target = loop.index0 %}
<tr><th>{{ target }}</th>
{%- for count, share in row %}
<td{% if loop.index0 == target %} class="right"{% endif %} style="--share: {{ share | round(2) }}">{{ count }}</td>
{%- endfor %}</tr>
{% endfor %}
</tbody>
</table></div>
{% endif %}
{% if per_class %}
<h2>Accuracy per class</h2>
<table class="bars">
{% for value in per_class %}
<tr><th>{{ loop.index0 }}</th><td>{{ "%.2f" | format(100 * value) }}&nbsp;%</td>
<td><div style="width: {{ 100 * value }}%"></div></td></tr>
{% endfor %}
</table>
{% endif %}
{% if mistakes %}
<h2>Misclassified digits</h2>
<div class="mistakes">
{% for source, mistake in mistakes %}
<figure><img src="{{ source }}" alt="a {{ mistake.target }}"><figcaption>{{ mistake.target }}, predicted
{{ mistake.predicted }} ({{ "%.1f" | format(100 * mistake.probability) }}&nbsp;%)</figcaption></figure>
{% endfor %}
</div>
{% endif %}
<h2>Configuration</h2>
<details><summary>All options</summary><pre>{{ config }}</pre></details>
</body>
</html>
"""
