"""The learning curves of the report: each point is at its value."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from html_page import SPACE, drawn
from run_report import NAN, make_history, make_result, write

from lit_mnist.report.plot import thin


def test_draws_the_curves_where_the_values_are(tmp_path: Path) -> None:
    history = [
        {"step": 50, "train_loss": 10.0, "lr": 0.1, "val_accuracy": 0.9},
        {"step": 100, "train_loss": 0.1, "lr": 0.2},
        {"step": 200, "train_loss": 1.0, "lr": 0.0, "val_accuracy": 0.95},
    ]
    page = write(tmp_path, history=history)
    lines = drawn(page)
    # the loss spans two decades, 0.1 to 10: its axis is logarithmic
    assert lines["train"] == [pytest.approx(point) for point in [(0.25, 1.0), (0.5, 0.0), (1.0, 0.5)]]
    assert lines["c0"] == [pytest.approx(point) for point in [(0.25, 0.5), (0.5, 1.0), (1.0, 0.0)]]
    assert lines["valid"] == [pytest.approx(point) for point in [(0.25, 0.0), (1.0, 1.0)]]
    labels = [e["text"] for e in page.find("text", "y")]
    assert labels[:7] == ["0.1", "0.2", "0.5", "1", "2", "5", "10"]
    assert f"{90}{SPACE}%" in labels
    assert [e["text"] for e in page.find("text", "x")][:5] == ["0", "50", "100", "150", "200"]
    assert {e["text"] for e in page.find("text", "name")} == {"optimizer step"}
    assert [e["text"] for e in page.find("h3")][:3] == ["loss", "lr", "accuracy"]


def test_a_resumed_run_says_which_steps_its_time_covers(tmp_path: Path) -> None:
    whole = write(tmp_path)
    assert "since the resume" not in whole.text
    result = make_result()
    result["train"]["steps"] = 720
    page = write(tmp_path, result=result)
    covered = "the last 720 of 1,720 steps, since the resume"
    assert covered in page.find("header")[0]["text"]
    facts = page.facts()
    assert facts["Training time"] == f"1{SPACE}min{SPACE}23{SPACE}s, {covered}"
    assert facts["Images per second"].endswith(f", {covered}")


def test_missing_and_infinite_values_are_not_drawn(tmp_path: Path) -> None:
    history = [
        {"step": 1, "epoch": 0, "train_loss": 2.0, "lr": NAN},
        {"step": 2, "epoch": 0, "train_loss": NAN, "val_loss": NAN, "val_accuracy": NAN},
        {"step": 3, "epoch": 0, "train_loss": math.inf},
        {"train_loss": 9.0},
        {"step": 4, "epoch": 0, "train_loss": 1.0},
    ]
    page = write(tmp_path, history=history)
    assert page.balanced
    assert [len(line) for style, line in drawn(page).items() if style != "rate"] == [2]
    values = [value or "" for element in page.elements for value in element["attrs"].values()]
    assert not any(re.search(r"\b(nan|inf)\b", value, re.IGNORECASE) for value in values)


@pytest.mark.parametrize("value", [0.0, 1e-9, 0.5, 1.0])
def test_one_point_is_a_dot(tmp_path: Path, value: float) -> None:
    history = [{"step": 7, "epoch": 0, "train_loss": value, "val_accuracy": value}]
    page = write(tmp_path, result=make_result() | {"test": None, "steps": None}, history=history, mistakes=[])
    assert page.balanced
    assert not page.find("polyline")
    dots = [e["attrs"] for e in page.find("circle", "dot")]
    assert [dot["cx"] for dot in dots] == ["100.00%"] * 2
    assert all(0 <= float(dot["cy"].rstrip("%")) <= 100 for dot in dots)
    shares = [float(e["text"].split(SPACE)[0]) for e in page.find("text", "y") if e["text"].endswith("%")]
    assert len(shares) >= 2
    assert all(0 <= share <= 100 for share in shares)


def test_epochs_are_ruled_off(tmp_path: Path) -> None:
    # four epochs have three ends inside, ruled in each of the three images
    assert len(write(tmp_path).find("line", "edge")) == 9
    assert not write(tmp_path, history=make_history()[:15]).find("line", "edge")


def test_a_long_history_is_drawn_as_means_with_their_range(tmp_path: Path) -> None:
    history = [{"step": n, "train_loss": 1.0 + 0.5 * (-1) ** n} for n in range(1, 20_001)]
    page = write(tmp_path, history=history)
    assert len(page.content) < 120_000
    assert len(drawn(page)["train"]) <= 400
    assert len(page.find("polygon", "band")) == 1
    rows = thin([(float(row["step"]), row["train_loss"]) for row in history])
    assert {(low, mean, high) for _, low, mean, high in rows} == {(0.5, 1.0, 1.5)}
    assert thin([(1.0, 2.0), (2.0, 3.0)]) == [(1.0, 2.0, 2.0, 2.0), (2.0, 3.0, 3.0, 3.0)]
