"""The report: one file that needs nothing else, contains every promised number, and shows missing values as dashes."""

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
from html_page import DASH, SPACE, Page
from PIL import Image
from run_report import DIGITS, NAN, confusion, make_mistakes, make_result, write

from lit_mnist.report import formats
from lit_mnist.report.page import Mistake


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
    assert [e["text"] for e in page.find("h3")][:3] == ["loss", "lr", "accuracy"]
    assert not Page("<p><b></p>").balanced
    assert not Page("<p>").balanced


def test_contains_every_number(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("classes", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (10, 47)), 62])
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
def test_a_mistake_rejects_other_images(image: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mistake(image=image, index=0, label=0, predicted=1, probability=0.5)


def test_rejects_what_does_not_fit_the_class_names(tmp_path: Path) -> None:
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
