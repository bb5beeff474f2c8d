"""The settings in a checkpoint as nested plain values, and which of them a resumed run may change."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_mnist.errors import InputError

# What a resumed run may change, with everything below it: where it runs, how long, and what observes it.
MAY_CHANGE = (
    "run",
    "model.compile",
    "model.weights",
    "model.checkpoint_activations",
    "data.root",
    "data.download",
    "data.eval_batch_size",
    "data.workers",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.accelerator",
    "trainer.strategy",
    "trainer.max_epochs",
    "trainer.max_steps",
    "trainer.max_time",
    "trainer.min_epochs",
    "trainer.min_steps",
    "trainer.callbacks",
    "trainer.detect_anomaly",
    "trainer.enable_model_summary",
    "trainer.enable_progress_bar",
    "trainer.log_every_n_steps",
    "trainer.logger",
    "trainer.profiler",
)


def flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Returns nested values as pairs of dotted key and value."""
    flat: list[tuple[str, Any]] = []
    for name, value in values.items():
        flat += flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(prefix + name, value)]
    return flat


def may_change(key: str) -> bool:
    """Returns whether a resumed run may change a setting, since it does not change what is computed."""
    return any(f"{key}.".startswith(f"{name}.") for name in MAY_CHANGE)


def check_same_settings(
    now: Mapping[str, Any], before: Mapping[str, Any], path: Path, *, sections: tuple[str, ...] | None = None
) -> None:
    """Checks that no setting differs from those in a checkpoint, except those that may change.

    Args:
        now: The settings as nested plain values.
        before: Those in the checkpoint.
        path: The checkpoint, for the message.
        sections: Sections or keys to compare, if the checkpoint has them; all by default.

    Raises:
        InputError: A setting differs; the message has both values.
    """
    old, new = (dict(flatten(json.loads(json.dumps(values)))) for values in (before, now))
    for key in [*old, *(key for key in new if key not in old and sections is None)]:
        compared = sections is None or key in sections or key.split(".")[0] in sections
        if compared and not may_change(key) and old.get(key) != new.get(key):
            raise InputError(f"{key} is {new.get(key)} here, but {old.get(key)} in {path}: remove it.")
