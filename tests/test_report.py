"""The report shows what the result has, and nothing else is needed to read it."""

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_mnist.report import Mistake, read_curves, write_report

METRICS = """epoch,lr-SGD,step,test_loss,train_loss,val_accuracy,val_loss
0,0.01,49,,2.5,,
0,0.02,99,,1.25,,
0,,119,,,0.875,0.5
0,,119,0.25,,,
"""
RESULT: dict[str, Any] = {
    "engine": "raw_ddp",
    "world_size": 7,
    "device": "cpu",
    "precision": "bf16-mixed",
    "config": {"model": {"warmup": 0.375}},
    "data": {"name": "kmnist", "sha256": "00"},
    "steps": 121,
    "epochs": 1,
    "train": {"images_per_s": 3456.5, "seconds": 12.5, "loss": 0.03125},
    "test": {
        "accuracy": 0.9876,
        "loss": 0.0421,
        "count": 205,
        "per_class": [0.98, 0.9615],
        "confusion": [[98, 2], [4, 101]],
    },
    "weights_sha256": "ab" * 32,
    "command": "python train.py --run-dir '<b>&'",
}
SHOWN = ["raw_ddp", "7", "cpu", "bf16-mixed", "kmnist", "121", "3,456.5", "12.5", "0.03125", "98.76%", "0.0421", "205"]
SHOWN += ["96.15\N{NO-BREAK SPACE}%", "98", "2", "4", "101", "ab" * 32, RESULT["command"]]


class Page(HTMLParser):
    """The texts, images and curves of a page; what it would load must be in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "srcset"):
                assert str(value).startswith(("data:", "#"))

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def test_the_page_shows_the_whole_result(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(METRICS)
    mistakes = [Mistake(np.full((28, 28), 7, np.uint8), 3, 5, 0.75), Mistake(np.zeros((28, 28), np.uint8), 4, 9, 0.5)]
    write_report(tmp_path, RESULT, mistakes)
    page = Page(tmp_path / "report.html")
    assert set(SHOWN) <= set(page.texts)
    assert "75.0" in " ".join(page.texts)
    assert page.tags.count("svg") == 3  # loss, accuracy, learning rate
    assert page.tags.count("img") == len(mistakes)


@pytest.mark.parametrize(
    "result",
    [
        {"engine": "lightning"},
        {"engine": "lightning", "train": None, "test": None, "data": None},
        {"test": {"iou": 0.5}},
    ],
)
def test_the_page_shows_what_there_is(tmp_path: Path, result: dict[str, Any]) -> None:
    write_report(tmp_path, result, [])
    page = Page(tmp_path / "report.html")
    assert {"svg", "img", "thead"}.isdisjoint(page.tags)
    assert result.get("engine", "0.5") in page.texts


@pytest.mark.parametrize(
    ("text", "curves"),
    [
        (
            METRICS,
            {
                "loss": {"train": ([49, 99], [2.5, 1.25]), "val": ([119], [0.5])},
                "accuracy": {"val": ([119], [0.875])},
                "lr-SGD": {"lr-SGD": ([49, 99], [0.01, 0.02])},
            },
        ),
        ("epoch,step,train/iou_epoch\n0,9,0.5\n", {"iou": {"train": ([9], [0.5])}}),
        ("epoch,step,mine,test_mine\n0,9,1,\n0,9,,2\n0,1", {"mine": {"mine": ([9], [1])}}),
        ("epoch,step\n", {}),
        ("", {}),
        (None, {}),
    ],
)
def test_curves_of_any_metrics(tmp_path: Path, text: str | None, curves: dict[str, Any]) -> None:
    if text is not None:
        (tmp_path / "metrics.csv").write_text(text)
    assert read_curves(tmp_path) == curves
    write_report(tmp_path, {}, [])
    assert Page(tmp_path / "report.html").tags.count("svg") == len(curves)
