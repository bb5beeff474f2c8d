"""The report: one file that needs nothing else, holds every promised number, and survives whatever was not measured."""

from __future__ import annotations

import base64
import importlib.resources
import io
import math
import os
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from conftest import ROOT
from html_page import DASH, SPACE, Page, drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lit_mnist.experiment import ModelSettings
from lit_mnist.report import formats
from lit_mnist.report.page import Mistake, write_report
from lit_mnist.report.plot import linear_axis, log_axis, step_axis, thin
from lit_mnist.training.schedule import lr_factor

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


def test_needs_nothing_outside_itself(tmp_path: Path) -> None:
    page = write(tmp_path)
    assert not re.search(r"https?:|url\(|@import|<script", page.content)
    addresses = [
        value
        for element in page.elements
        for name, value in element["attrs"].items()
        if name in {"src", "href", "srcset", "data", "action", "poster", "xlink:href"}
    ]
    assert len(addresses) == 6  # the five images and the empty icon
    assert all(address.startswith("data:") for address in addresses)
    policy = next(e["attrs"]["content"] for e in page.find("meta") if "http-equiv" in e["attrs"])
    assert "default-src 'none'" in policy
    assert "script-src" not in policy


def test_is_a_balanced_page_with_the_sections_in_order(tmp_path: Path) -> None:
    page = write(tmp_path)
    assert page.content.startswith("<!DOCTYPE html>")
    assert page.balanced
    assert [e["text"] for e in page.find("h2")] == ["Learning", "Confusion", "Worst mistakes", "The run"]
    assert [e["text"] for e in page.find("h3")][:3] == ["Loss", "Accuracy", "Learning rate"]
    assert not Page("<p><b></p>").balanced
    assert not Page("<p>").balanced


def test_holds_every_number(tmp_path: Path) -> None:
    page = write(tmp_path)
    matrix = confusion(10)
    total, right = sum(map(sum, matrix)), sum(matrix[n][n] for n in range(10))
    (headline,) = page.find("h1")
    assert f"{100 * right / total:.4f}{SPACE}%" in headline["text"]
    header = page.find("header")[0]["text"]
    assert f"{total - right:,} wrong of {total:,} test images" in header
    for part in ("raw_ddp", f"3{SPACE}ranks", "NVIDIA H200", "16-mixed", f"1{SPACE}min{SPACE}23{SPACE}s"):
        assert part in header
    assert re.search(rf"41,23[45]{SPACE}images/s", header)
    facts = page.facts()
    assert {name: facts[name] for name in facts if "accuracy" not in name and name != "Images per second"} == {
        "Training loss": "0.03125",
        "Validation loss": "0.04321",
        "Validation images": "5,001",
        "Test loss": "0.05678",
        "Test images": f"{total:,}",
        "Epochs": "4",
        "Optimizer steps": "1,720",
        "Skipped steps": "3",
        "Training time": f"1{SPACE}min{SPACE}23{SPACE}s",
        "Time to first step": f"12.3{SPACE}s",
        "Peak memory": f"3.0{SPACE}GiB",
        "Ranks": "3",
        "Threads per rank": "7",
        "torch": "2.99.1+cpu",
        "lightning": "9.8.7",
        "Command": "python train.py --devices 3",
        "Commit": "c0ffee" * 6,
        "Run folder": "runs/2031-mnist",
        "Data": "mnist",
        "Data source": "embedded",
        "Data SHA-256": "d" * 64,
        "Weights SHA-256": "e" * 64,
    }
    assert facts["Validation accuracy"] == f"98.76{SPACE}%"


def test_the_configuration_can_be_copied_as_yaml(tmp_path: Path) -> None:
    page = write(tmp_path)
    assert yaml.safe_load("".join(e["text"] for e in page.find("pre"))) == make_result()["config"]


def table_of(page: Page) -> list[list[int]]:
    rows: list[list[int]] = []
    for element in page.elements:
        if element["tag"] == "tr":
            rows.append([])
        elif element["tag"] == "td" and element["text"]:
            rows[-1].append(int(element["text"]))
    return [row for row in rows if row]


@pytest.mark.parametrize("classes", [2, 10, 47, 62])
def test_shows_every_count_and_class(tmp_path: Path, classes: int) -> None:
    names = [f"c{n}" for n in range(classes)]
    page = write(tmp_path, result=make_result(classes), mistakes=make_mistakes(3, classes), class_names=names)
    matrix = confusion(classes)
    assert page.balanced
    assert table_of(page) == matrix
    assert [e["text"] for e in page.find("th")] == [*names, *names]
    items = [e["text"] for e in page.find("li")]
    assert len(items) == classes
    for n, item in enumerate(items):
        total = sum(matrix[n])
        wrong = total - matrix[n][n]
        assert item == f"c{n}{formats.percent(wrong / total, total)}{wrong:,} of {total:,}"
    assert len(page.find("div", "small")) == (classes > 12)


def test_right_and_wrong_have_scales_of_their_own(tmp_path: Path) -> None:
    result = make_result(3)
    result["test"] |= {"confusion": [[9000, 4, 0], [1, 4500, 0], [0, 0, 9000]], "per_class": None}
    page = write(tmp_path, result=result, mistakes=[], class_names=["a", "b", "c"])
    shades = {e["text"]: (e["attrs"]["class"], e["attrs"]["style"]) for e in page.find("td") if "style" in e["attrs"]}
    assert shades == {
        "9000": ("right", "--shade:1.00"),
        "4500": ("right", "--shade:0.50"),
        "4": ("wrong", "--shade:1.00"),
        "1": ("wrong", "--shade:0.50"),
    }
    assert "Most frequent: a predicted as b (4), b predicted as a (1)." in page.text
    # the errors of a class as a share of its samples, the worst class's bar full: 4 of 9004, 1 of 4501, none
    bars = [e["attrs"]["style"] for e in page.find("i") if "width" in e["attrs"].get("style", "")]
    assert bars == ["width:100.0%", f"width:{100 * (1 / 4501) / (4 / 9004):.1f}%", "width:0.0%"]


def test_escapes_hostile_strings(tmp_path: Path) -> None:
    bad = '</style></pre><script>alert(1)</script><img src=x onerror="a"\'&\x00\udcff'
    result = make_result()
    for name in ("engine", "device", "precision", "weights_sha256", "commit", "command", "run_dir"):
        result[name] = bad
    result["data"] = {"name": bad, "source": bad, "sha256": bad}
    result["versions"] = {bad: bad}
    result["config"] = {bad: {bad: [bad]}, "model": {"net": bad}}
    names = [bad + str(n) for n in range(10)]
    page = write(tmp_path, result=result, class_names=names)
    clean = write(tmp_path)
    assert page.balanced
    tags, expected = ({element["tag"] for element in each.elements} for each in (page, clean))
    assert tags == expected
    assert len(page.find("img")) == 5
    assert not any(name.startswith("on") for element in page.elements for name in element["attrs"])
    seen = bad.replace("\x00", "\\x00").replace("\udcff", "\\udcff")
    # all texts of the facts, and the names of the columns' heads
    assert sum(element["text"].count(seen) for element in page.find("dd")) == 8
    assert [e["text"] for e in page.find("th")][:10] == [seen + str(n) for n in range(10)]


def test_survives_a_result_of_nothing_but_none(tmp_path: Path) -> None:
    result: dict[str, Any] = dict.fromkeys(make_result())
    page = write(tmp_path, result=result, history=[], mistakes=[])
    assert page.balanced
    assert set(page.facts().values()) == {DASH}
    assert f"{DASH} wrong of {DASH} test images" in page.text
    for sentence in ("No metrics were logged.", "No confusion matrix was recorded.", "No images were recorded."):
        assert sentence in page.text
    assert "None" not in page.text
    assert "nan" not in page.text
    assert write(tmp_path, result={}, history=[], mistakes=[]).text == page.text


def test_survives_parts_of_none(tmp_path: Path) -> None:
    result = make_result()
    for part in ("train", "validation", "test", "data"):
        result[part] = dict.fromkeys(result[part])
    page = write(tmp_path, result=result, mistakes=[])
    facts = page.facts()
    assert facts["Optimizer steps"] == "1,720"
    assert {facts[f"{name} {part}"] for name in ("Test", "Validation") for part in ("accuracy", "loss", "images")} == {
        DASH
    }
    del result["validation"]
    assert write(tmp_path, result=result, mistakes=[]).facts() == facts


def test_a_value_that_is_no_number_says_so(tmp_path: Path) -> None:
    result = make_result()
    result["train"]["loss"] = NAN
    result["test"] |= {"loss": math.inf, "accuracy": NAN}
    facts = write(tmp_path, result=result).facts()
    assert (facts["Training loss"], facts["Test loss"], facts["Test accuracy"]) == ("NaN", "∞", "NaN")


def test_a_class_without_samples_has_no_accuracy(tmp_path: Path) -> None:
    result = make_result(2)
    result["test"] |= {"confusion": [[5, 1], [0, 0]], "per_class": [5 / 6, NAN]}
    page = write(tmp_path, result=result, mistakes=[], class_names=["a", "b"])
    assert [e["text"] for e in page.find("li")] == [f"a16.67{SPACE}%1 of 6", f"b{DASH}0 of 0"]


def test_draws_the_curves_where_the_values_are(tmp_path: Path) -> None:
    result = with_schedule(200, lr=0.2, schedule="constant", warmup=0.5)
    result["test"]["accuracy"] = 0.94
    history = [
        {"step": 50, "train_loss": 10.0, "lr": 0.1, "val_accuracy": 0.9},
        {"step": 100, "train_loss": 0.1, "lr": 0.2},
        {"step": 200, "train_loss": 1.0, "lr": 0.0, "val_accuracy": 0.95},
    ]
    page = write(tmp_path, result=result, history=history)
    lines = drawn(page)
    # the loss spans two decades, 0.1 to 10: its axis is logarithmic
    assert lines["train"] == [pytest.approx(point) for point in [(0.25, 1.0), (0.5, 0.0), (1.0, 0.5)]]
    # from the first step on linearly up to its peak, and then level: whatever the few logged rates are
    assert lines["rate"][0] == pytest.approx((1 / 200, 0.01), abs=1e-4)
    assert {y for x, y in lines["rate"] if x >= 0.5} == {1.0}
    assert lines["valid"] == [pytest.approx(point) for point in [(0.25, 0.0), (1.0, 1.0)]]
    (mark,) = page.find("svg", "diamond")
    assert (mark["attrs"]["x"], mark["attrs"]["y"]) == ("100.00%", "20.00%")
    labels = [e["text"] for e in page.find("text", "y")]
    assert labels[:7] == ["0.1", "0.2", "0.5", "1", "2", "5", "10"]
    assert labels[7:13] == [f"{n}{SPACE}%" for n in range(90, 96)]
    assert [e["text"] for e in page.find("text", "x")][:5] == ["0", "50", "100", "150", "200"]
    assert {e["text"] for e in page.find("text", "name")} == {"optimizer step"}


def with_schedule(steps: int, *, made: int | None = None, lr: float = 0.1, **model: Any) -> dict[str, Any]:
    """A run's result, with a schedule over so many steps, of which the run made some or all."""
    result = make_result() | {"steps": made or steps}
    result["config"]["model"] = {"schedule": "onecycle", "warmup": None} | model
    result["train"] |= {"lr": lr, "steps": made or steps, "scheduled_steps": steps}
    return result


@pytest.mark.parametrize("steps", [1, 2, 3, 20, 859, 100_003])
@pytest.mark.parametrize("schedule", ["onecycle", "cosine", "constant", "polynomial"])
def test_the_learning_rate_is_that_of_the_schedule_with_its_exact_peak(
    tmp_path: Path, steps: int, schedule: Any
) -> None:
    """Whatever was logged: at 20 steps one row is, after the first."""
    history = [{"step": 1, "epoch": 0, "train_loss": 2.0, "lr": 0.02}, {"step": steps, "train_loss": 1.0, "lr": 1e-4}]
    page = write(tmp_path, result=with_schedule(steps, schedule=schedule, warmup=0.25), history=history, mistakes=[])
    settings = ModelSettings(schedule=schedule, warmup=0.25)
    lrs = [0.1 * lr_factor(settings, step, steps) for step in range(steps)]
    highest = max(lrs)
    (legend,) = (e["text"] for e in page.find("span", "key") if "highest" in e["text"])
    assert legend == f"highest {formats.short(highest)}"
    assert legend == "highest 0.1" or steps <= 3
    if steps == 1:
        assert "rate" not in drawn(page)
        return
    line = drawn(page)["rate"]
    assert len(line) <= 400
    top = max(float(e["text"]) for e in page.find("text", "y")[-3:])
    for x, y in line:
        assert y * top == pytest.approx(lrs[max(1, round(x * steps)) - 1], abs=2e-3 * top)
    assert max(y for _, y in line) == pytest.approx(highest / top, abs=1e-3)
    assert line[0][0] == pytest.approx(1 / steps, abs=1e-4)
    assert line[-1][0] == 1.0


def test_a_run_that_was_stopped_early_shows_its_part_of_the_schedule(tmp_path: Path) -> None:
    page = write(tmp_path, result=with_schedule(200, made=25), history=[{"step": 25, "train_loss": 1.0}], mistakes=[])
    settings = ModelSettings()
    (legend,) = (e["text"] for e in page.find("span", "key") if "highest" in e["text"])
    assert legend == f"highest {formats.short(float(f'{0.1 * lr_factor(settings, 24, 200):.4g}'))}"


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


def test_mistakes_are_shown_surest_first_with_their_images(tmp_path: Path) -> None:
    mistakes = make_mistakes(60)
    page = write(tmp_path, mistakes=mistakes)
    surest = sorted(mistakes, key=lambda mistake: -mistake.probability)[:40]
    figures = [e["text"] for e in page.find("figure", "mistake")]
    assert figures == [
        f"{one.label} → {one.predicted} {100 * one.probability:.2f}{SPACE}% #{one.index}" for one in surest
    ]
    for element, mistake in zip(page.find("img"), surest, strict=True):
        data = base64.b64decode(element["attrs"]["src"].removeprefix("data:image/png;base64,"))
        with Image.open(io.BytesIO(data)) as image:
            assert image.format == "PNG"
            # dark on light, as in predictions.png
            np.testing.assert_array_equal(np.asarray(image), 255 - mistake.image)
    assert "image-rendering:pixelated" in page.content


def test_no_mistakes_is_told_from_no_images(tmp_path: Path) -> None:
    assert "No images were recorded." in write(tmp_path, mistakes=[]).text
    result = make_result(2)
    result["test"] |= {"confusion": [[5, 0], [0, 6]], "accuracy": 1.0, "per_class": [1.0, 1.0], "count": 11}
    perfect = write(tmp_path, result=result, mistakes=[], class_names=["a", "b"])
    assert "Every test image was classified correctly." in perfect.text
    assert "0 wrong of 11 test images" in perfect.text


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((28, 28), dtype=np.float32), "float32"),
        (np.zeros((1, 28, 28), dtype=np.uint8), "1, 28, 28"),
    ],
)
def test_a_mistake_refuses_other_images(image: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mistake(image=image, index=0, label=0, predicted=1, probability=0.5)


def test_refuses_what_does_not_fit_the_class_names(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not 9 x 9"):
        write(tmp_path, class_names=DIGITS[:9], mistakes=[])
    result = make_result()
    result["test"]["per_class"] = [1.0]
    with pytest.raises(ValueError, match="1 accuracies"):
        write(tmp_path, result=result)
    result["test"] = None
    for classes in ({"label": 10, "predicted": 1}, {"label": 1, "predicted": -1}):
        wrong = Mistake(image=np.zeros((28, 28), np.uint8), index=5, probability=0.5, **classes)
        with pytest.raises(ValueError, match="Test image 5"):
            write(tmp_path, result=result, mistakes=[wrong])
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = write(tmp_path).content

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, mistakes=[])
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == old
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_the_page_is_whole_and_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[int, bool]] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        fsync(descriptor)
        synced.append((os.fstat(descriptor).st_size, (tmp_path / "report.html").exists()))

    monkeypatch.setattr(os, "fsync", record)
    write(tmp_path)
    assert synced[0] == ((tmp_path / "report.html").stat().st_size, False)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_rounding_never_hides_an_error() -> None:
    for samples in (1000, 10_000, 10_001, 60_000, 116_323):
        assert formats.percent(1 - 1 / samples, samples) != formats.percent(1.0, samples)
        assert not formats.percent(1 - 1 / samples, samples).startswith("100")
    assert formats.percent(0.9908, 10_000) == f"99.08{SPACE}%"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (formats.duration(0.0123), "0.012 s"),
        (formats.duration(59.94), "59.9 s"),
        (formats.duration(59.96), "1 min 00 s"),
        (formats.duration(3599.7), "1 h 00 min"),
        (formats.duration(11_220), "3 h 07 min"),
        (formats.size(512), "512 B"),
        (formats.size(1024), "1.0 KiB"),
        (formats.size(1.5 * 1024**4), "1.5 TiB"),
        (formats.number(0), "0.000"),
        (formats.number(0.031249), "0.03125"),
        (formats.number(12345.6), "12,346"),
        (formats.number(0.0000123456), "1.235e-5"),
        (formats.number(-math.inf), "\u2212∞"),
        (formats.count(10_000), "10,000"),
        (formats.short(1e-5), "1e-5"),
    ],
)
def test_values_are_written_as_people_write_them(written: str, expected: str) -> None:
    assert written.replace(SPACE, " ") == expected


finite = st.floats(-1e6, 1e6)


@settings(deadline=None)
@given(values=st.lists(finite, min_size=1, max_size=20), least=st.floats(1e-6, 1e3))
def test_a_linear_axis_covers_its_values_with_different_ticks(values: list[float], least: float) -> None:
    axis = linear_axis(values, least=least)
    slack = 1e-6 * (axis.high - axis.low)
    assert axis.low - slack <= min(values) <= max(values) <= axis.high + slack
    assert 2 <= len(axis.ticks) <= 12
    assert list(axis.ticks) == sorted(set(axis.ticks))
    assert (axis.share(axis.low), axis.share(axis.high)) == (0, 1)
    if axis.high - axis.low > 1e-4:
        assert len(set(axis.tick_labels())) == len(axis.ticks)


@settings(deadline=None)
@given(low=st.floats(1e-12, 1e6), factor=st.floats(10, 1e30))
def test_a_log_axis_covers_its_values_evenly(low: float, factor: float) -> None:
    axis = log_axis([low, low * factor])
    assert axis.low <= low < low * factor <= axis.high
    assert 2 <= len(axis.ticks) <= 10
    assert axis.share(math.sqrt(axis.low * axis.high)) == pytest.approx(0.5)
    assert len(set(axis.tick_labels())) == len(axis.ticks)


def test_ticks_are_round() -> None:
    assert step_axis(100).ticks == (0, 20, 40, 60, 80, 100)
    assert linear_axis([0.0, 0.3], least=0.1).ticks == (0.0, 0.1, 0.2, 0.3)
    assert log_axis([0.03, 0.6]).ticks == (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
    assert log_axis([0.003, 60]).ticks == (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)


@settings(deadline=None)
@given(last=st.integers(0, 10**9))
def test_the_step_axis_ends_at_the_last_step(last: int) -> None:
    axis = step_axis(last)
    assert (axis.low, axis.high) == (0, max(last, 1))
    assert axis.ticks[0] == 0
    assert 2 <= len(axis.ticks) <= 6
    assert axis.ticks[-1] <= axis.high
    assert all(tick == int(tick) for tick in axis.ticks)


def test_every_template_is_installed_with_its_package() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for package in ("lit_mnist.report", "lit_mnist.comparison"):
        templates = importlib.resources.files(package) / "templates"
        names = [f"templates/{file.name}" for file in templates.iterdir()]
        assert any(name.endswith(".html.jinja") for name in names)
        assert all(any(fnmatch(name, pattern) for pattern in patterns[package]) for name in names)


def test_imports_neither_lightning_nor_torch() -> None:
    code = "import sys, lit_mnist.report.page; print({'torch', 'lightning', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"
