"""A result, a history and mistakes, and the report written from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from html_page import Page

from lit_mnist.report.page import Mistake, write_report

DIGITS = [str(n) for n in range(10)]
NAN = float("nan")


def confusion(classes: int) -> list[list[int]]:
    """A matrix in which no two counts are equal, except for the zeros beside the diagonal."""
    rows = [[100 * n + m + 1 for m in range(classes)] for n in range(classes)]
    for n in range(classes):
        rows[n][n] += 20_000
        rows[n][n - 1] = 0
    return rows


def make_result(classes: int = 10) -> dict[str, Any]:
    matrix = confusion(classes)
    total = sum(map(sum, matrix))
    right = sum(matrix[n][n] for n in range(classes))
    return {
        "engine": "raw_ddp",
        "world_size": 3,
        "device": "NVIDIA H200",
        "precision": "16-mixed",
        "config": {"seed_everything": 42, "model": {"net": "basicnet", "schedule": "onecycle"}, "data": {"root": None}},
        "data": {"name": "mnist", "source": "embedded", "sha256": "d" * 64},
        "steps": 1720,
        "skipped_steps": 3,
        "epochs": 4,
        "threads": 7,
        "train": {
            "images_per_s": 41234.5,
            "seconds": 83.0,
            "loss": 0.03125,
            "lr": 0.2,
            "steps": 1720,
            "scheduled_steps": 1720,
        },
        "validation": {"accuracy": 0.9876, "loss": 0.04321, "count": 5001},
        "test": {
            "accuracy": right / total,
            "loss": 0.05678,
            "count": total,
            "per_class": [matrix[n][n] / sum(matrix[n]) for n in range(classes)],
            "confusion": matrix,
        },
        "weights_sha256": "e" * 64,
        "seconds_to_first_step": 12.34,
        "peak_memory_bytes": 3 * 1024**3,
        "versions": {"torch": "2.99.1+cpu", "lightning": "9.8.7"},
        "commit": "c0ffee" * 6,
        "command": "python train.py --devices 3",
        "run_dir": "runs/2031-mnist",
    }


def make_history() -> list[dict[str, float]]:
    rows: list[dict[str, float]] = []
    for step in range(20, 1721, 20):
        rows.append({"step": step, "epoch": (step - 1) // 430, "train_loss": 2.3 / step, "lr": 0.2 * step / 1720})
        if step % 430 < 20:
            rows.append({"step": step, "epoch": (step - 1) // 430, "val_loss": 1 / step, "val_accuracy": 1 - 9 / step})
            rows[-1]["train_loss"] = NAN
    return rows


def make_mistakes(number: int, classes: int = 10) -> list[Mistake]:
    rng = np.random.default_rng(0)
    return [
        Mistake(
            image=rng.integers(0, 256, (28, 28), dtype=np.uint8),
            index=7000 + n,
            label=n % classes,
            predicted=(n + 1) % classes,
            probability=0.3 + 0.6 * ((n * 37) % number) / number,
        )
        for n in range(number)
    ]


def write(tmp_path: Path, **changes: Any) -> Page:
    arguments: dict[str, Any] = {
        "result": make_result(),
        "history": make_history(),
        "mistakes": make_mistakes(5),
        "class_names": DIGITS,
    }
    write_report(tmp_path / "report.html", **(arguments | changes))
    return Page((tmp_path / "report.html").read_text(encoding="utf-8"))
