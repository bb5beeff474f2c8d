"""The table, the lines and the grid of predicted digits."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from digit_images import Array, load_test_digits
from matplotlib.figure import Figure
from PIL import Image

from lit_mnist.errors import InputError
from lit_mnist.predict.grid import draw_grid
from lit_mnist.predict.table import NO_INK, DigitPrediction, format_predictions, write_table


@pytest.fixture(scope="session")
def digits() -> torch.Tensor:
    return load_test_digits()


def test_the_table_of_a_labeled_data_set(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("older")
    write_table(path, [DigitPrediction(7, 1.0, 7), DigitPrediction(2, 0.1234567, 3), DigitPrediction(1, 0.5, 1)])
    assert path.read_bytes() == b"index,label,predicted,probability\n0,7,7,1.000000\n1,3,2,0.123457\n2,1,1,0.500000\n"
    assert list(tmp_path.iterdir()) == [path]


def test_the_table_of_user_images(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    files = [Path('a,"b".png'), Path("two\nlines.png"), Path(os.fsdecode(b"caf\xe9.png"))]
    notes = ["", "uncertain: probability below 70 %", NO_INK]
    predictions = zip((7, 2, 1), (0.9, 0.6, 0.8), files, notes, strict=True)
    write_table(
        path, [DigitPrediction(predicted, share, None, file, note) for predicted, share, file, note in predictions]
    )
    with path.open(newline="", errors="surrogateescape") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["index", "label", "predicted", "probability", "file", "note"]
    assert [Path(row["file"]) for row in rows] == files
    assert [row["note"] for row in rows] == notes
    assert [(row["index"], row["label"], row["predicted"], row["probability"]) for row in rows] == [
        ("0", "", "7", "0.900000"),
        ("1", "", "2", "0.600000"),
        ("2", "", "", ""),
    ]


def test_a_few_images_have_a_line_each() -> None:
    files = [Path("one.png"), Path("my/two\n.png"), Path(os.fsdecode(b"\x1b[31mcaf\xe9.png")), Path("four.png")]
    notes = ["", "uncertain: probability below 70 %", NO_INK, ""]
    names = ["T-shirt", "Sandal"]
    rows = zip((0, 1, 1, 1), (0.99994, 0.5, 0.9, 1.0), files, notes, strict=True)
    predictions = [DigitPrediction(predicted, share, None, file, note) for predicted, share, file, note in rows]
    assert format_predictions(predictions, names) == [
        "one.png -> T-shirt (99.99 %)",
        "my/two\\n.png -> Sandal (50.00 %), uncertain: probability below 70 %",
        "\\x1b[31mcaf\\udce9.png -> no ink",
        "four.png -> Sandal (99.99 %)",
    ]
    assert format_predictions(6 * predictions, names) == ["uncertain 12 of 24 images: see their note in the table"]
    assert format_predictions(24 * predictions[:1], names) == []


def test_a_table_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone.*table\.csv"):
        write_table(tmp_path / "gone" / "table.csv", [DigitPrediction(1, 0.5)])
    assert list(tmp_path.iterdir()) == []


DIGITS = [str(number) for number in range(10)]


def red_pixels(path: Path) -> Array:
    """Counts the red pixels of each column of a grid."""
    with Image.open(path) as image:
        colours = np.asarray(image.convert("RGB")).astype(int)
    red = (colours[..., 0] > 150) & (colours[..., 1] < 100) & (colours[..., 2] < 100)
    counts: Array = red.sum(axis=0)
    return counts


def test_the_grid_marks_wrong_predictions(tmp_path: Path, digits: torch.Tensor) -> None:
    path = tmp_path / "grid.png"
    right = [DigitPrediction(number % 10, 0.75, number % 10) for number in range(12)]
    draw_grid(path, digits[:12], right, DIGITS, limit=8)
    with Image.open(path) as image:
        image.verify()
        assert image.format == "PNG"
        assert image.info["Title"] == "Showing 8 of 12 images"
        width = image.width
    assert red_pixels(path).sum() == 0
    wrong = [DigitPrediction(0, 0.75, 9), *right[1:11], DigitPrediction(1, 0.75, 9)]
    draw_grid(path, digits[:12], wrong, DIGITS, limit=8)
    with Image.open(path) as image:
        assert image.info["Description"].startswith("1 of these wrong")
        assert image.info["Description"].endswith("2 of all")
    red = red_pixels(path)
    assert red[: width // 6].sum() > 500
    assert red[width // 6 :].sum() == 0
    draw_grid(path, digits[:12], [prediction._replace(label=None) for prediction in wrong], DIGITS, limit=8)
    assert red_pixels(path).sum() == 0
    assert list(tmp_path.iterdir()) == [path]


def test_the_grid_grows_with_images_and_names(tmp_path: Path, digits: torch.Tensor) -> None:
    sizes = {}
    for name, count, names in (("one", 1, DIGITS), ("many", 30, DIGITS), ("named", 30, ["$T-shirt$ / ^top"] * 10)):
        draw_grid(tmp_path / name, digits[:count], count * [DigitPrediction(0, 0.75)], names)
        with Image.open(tmp_path / name) as image:
            sizes[name] = image.size
    assert sizes["one"][0] < sizes["many"][0] < sizes["named"][0]
    assert sizes["one"][1] < sizes["many"][1]


def test_the_grid_shows_file_names_and_uncertain_predictions(
    tmp_path: Path, digits: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    saving = Figure.savefig

    def noted(figure: Figure, *arguments: Any, **options: Any) -> None:
        shown.extend(text.get_text() for text in figure.axes[0].texts)
        saving(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", noted)
    files = [Path("my/one.png"), Path("a-very-long-name-of-a-file.png"), Path("$x_1$\n日本.png"), Path("blank.png")]
    notes = ["", "uncertain: probability below 70 %", "", NO_INK]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predictions = [DigitPrediction(number, 0.75, None, files[number], notes[number]) for number in range(4)]
        draw_grid(tmp_path / "a.png", digits[:4], predictions, DIGITS)
    assert [text for text in shown[2:] if text not in {"75.0%", ""}] == [
        *("0", "one.png", "1 ?", "a-very-…ile.png", "2", "$x_1$\\n日本.png", "no ink", "blank.png")
    ]
    assert "2 of all uncertain" in shown[1]


def test_a_grid_that_cannot_be_written_is_an_error(tmp_path: Path, digits: torch.Tensor) -> None:
    with pytest.raises(InputError, match=r"gone.*a\.png"):
        draw_grid(tmp_path / "gone" / "a.png", digits[:1], [DigitPrediction(1, 0.5)], DIGITS)
    assert list(tmp_path.iterdir()) == []


def test_the_import_is_quick() -> None:
    code = "import sys, lit_mnist.predict.grid, lit_mnist.predict.user_images; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    loaded = done.stdout.split()
    assert "lit_mnist.predict.grid" in loaded
    assert not {"matplotlib", "lightning"} & set(loaded)
