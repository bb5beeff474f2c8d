"""What was run, measured and used: the numbers, the origins, the versions and the configuration."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from lit_mnist.report.formats import MISSING, count, duration, number, percent, size, text

Row = tuple[str, str]


def facts(result: Mapping[str, Any]) -> str:
    """Returns the section of the run's facts as HTML; every value that is absent or None is an en dash."""
    origin = [
        ("Command", code(result.get("command"))),
        ("Commit", code(result.get("commit"))),
        ("Run folder", code(result.get("run_dir"))),
        *data_rows(result.get("data") or {}),
        ("Weights SHA-256", code(result.get("weights_sha256"))),
    ]
    versions = [(name, text(version)) for name, version in (result.get("versions") or {}).items()]
    return (
        f"<div class=facts>{block('Results', outcome(result))}{block('Cost', cost(result))}"
        f"{block('Versions', versions)}</div>"
        f"{block('Origin', origin, 'block origin')}{configuration(result.get('config') or {})}"
    )


def outcome(result: Mapping[str, Any]) -> list[Row]:
    """Returns what the run reached: accuracies, losses and over how many images they were taken."""
    rows = [("Training loss", number((result.get("train") or {}).get("loss")))]
    for name in ("validation", "test"):
        part = result.get(name) or {}
        if "mean_iou" in part:
            rows.append((f"{name.capitalize()} mean IoU", percent(part.get("mean_iou"))))
        rows.append((f"{name.capitalize()} accuracy", percent(part.get("accuracy"), part.get("count"))))
        rows.append((f"{name.capitalize()} loss", number(part.get("loss"))))
        rows.append((f"{name.capitalize()} images", count(part.get("count"))))
    return rows


def cost(result: Mapping[str, Any]) -> list[Row]:
    """Returns what the run took: steps, time and memory."""
    train = result.get("train") or {}
    part = f", {covered(result)}" if covered(result) else ""
    return [
        ("Epochs", count(result.get("epochs"))),
        ("Optimizer steps", count(result.get("steps"))),
        ("Skipped steps", count(result.get("skipped_steps"))),
        ("Training time", duration(train.get("seconds")) + part),
        ("Images per second", number(train.get("images_per_s")) + part),
        ("Time to first step", duration(result.get("seconds_to_first_step"))),
        ("Peak memory", size(result.get("peak_memory_bytes"))),
        ("Ranks", count(result.get("world_size"))),
        ("Threads per rank", count(result.get("threads"))),
    ]


def covered(result: Mapping[str, Any]) -> str:
    """Returns which steps time and speed cover: of a resumed run the last ones alone; empty where it is all of them."""
    steps, timed = result.get("steps"), (result.get("train") or {}).get("steps")
    if steps is None or timed is None or timed >= steps:
        return ""
    return f"the last {count(timed)} of {count(steps)} steps, since the resume"


def data_rows(data: Mapping[str, Any]) -> list[Row]:
    """Returns what is known of the data."""
    return [
        ("Data", code(data.get("name"))),
        ("Data source", code(data.get("source"))),
        ("Data SHA-256", code(data.get("sha256"))),
    ]


def block(title: str, rows: Iterable[Row], style: str = "block") -> str:
    """Returns a titled list of names (plain text) and values (HTML)."""
    items = "".join(f"<div><dt>{text(name)}</dt><dd>{value}</dd></div>" for name, value in rows)
    return (
        f'<div class="{style}">'
        f"<h3>{title}</h3>{f'<dl>{items}</dl>' if items else f'<p class=quiet>{MISSING}</p>'}</div>"
    )


def code(value: object) -> str:
    """Returns a value for a machine's eyes, which may break anywhere."""
    return text(value) if value is None else f"<code>{text(value)}</code>"


def configuration(config: Mapping[str, Any]) -> str:
    """Returns the configuration as YAML that a configuration file may hold, a block for each section."""
    # plain values only, as the result file would give them back
    plain = json.loads(json.dumps(config, default=str))
    blocks = "".join(
        f"<pre>{text(yaml.safe_dump({name: value}, sort_keys=False, allow_unicode=True, width=1000))}</pre>"
        for name, value in plain.items()
    )
    return f"<div class=block><h3>Configuration</h3><div class=yaml>{blocks or MISSING}</div></div>"
