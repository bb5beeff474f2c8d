"""`predict`: one ordered table and one image, for any number of ranks."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
import pytest
from conftest import Program
from PIL import Image

from lit_mnist.data.dataset import load_dataset


@pytest.fixture(scope="module")
def trained(shared_program: Program) -> Path:
    return shared_program.train("--max-steps", 60, "--lr", 0.05, "--data.test_size", 100, "--devices", 2)


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "predictions.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_table_is_the_same_for_any_number_of_ranks(trained: Path, shared_program: Program) -> None:
    tables = []
    for ranks in (1, 3):
        folder = shared_program.train("predict", "--ckpt", trained, "--devices", ranks, "--data.test_size", 1001)
        tables.append(rows_of(folder))
        with Image.open(folder / "predictions.png") as image:
            assert image.format == "PNG"
            assert min(image.size) > 500
    labels = load_dataset().test.labels[:1001].tolist()
    for table in tables:
        assert list(table[0]) == ["index", "label", "predicted", "probability"]
        assert [int(row["index"]) for row in table] == list(range(1001))
        assert [int(row["label"]) for row in table] == labels
        assert all(0.1 <= float(row["probability"]) <= 1 for row in table)
    assert [row["predicted"] for row in tables[0]] == [row["predicted"] for row in tables[1]]
    right = sum(row["label"] == row["predicted"] for row in tables[0])
    assert right > 900


def test_several_ranks_read_the_images_of_a_user(trained: Path, shared_program: Program) -> None:
    folder = shared_program.folder / "digits"
    (folder / "deep").mkdir(parents=True)
    test = load_dataset().test
    for index in range(12):
        ink = Image.fromarray(255 - test.images[index].numpy()).resize((140, 140), Image.Resampling.BICUBIC)
        ink.save(folder / ("deep" if index % 2 else ".") / f"{index:02}.jpg", quality=80)
    found = shared_program.train("predict", "--ckpt", trained, "--devices", 2, "--images", folder)
    table = rows_of(found)
    assert list(table[0]) == ["index", "label", "predicted", "probability", "file", "note"]
    assert len(table) == 12
    assert {Path(row["file"]).name for row in table} == {f"{index:02}.jpg" for index in range(12)}
    right = sum(int(row["predicted"]) == int(test.labels[int(Path(row["file"]).stem)]) for row in table)
    assert right >= 11
    assert all(row["label"] == "" for row in table)


def test_the_prediction_is_printed_and_images_without_ink_are_marked(trained: Path, program: Program) -> None:
    test = load_dataset().test.images.numpy()
    white, own = np.full((90, 120), 255, np.uint8), program.folder / "own"
    own.mkdir()
    noise = np.random.default_rng(0).integers(0, 256, white.shape, dtype=np.uint8)
    for name, image in (("one", 255 - test[0]), ("blank", white), ("noise", noise)):
        Image.fromarray(image).save(own / f"{name}.png")

    done = program("predict", "--ckpt", trained, "--images", own / "one.png", "--run-dir", "one")
    assert done.code == 0, done.err
    assert re.search(rf"^{own}/one\.png -> 7 \(\d\d\.\d\d %\)$", done.out, re.MULTILINE), done.out
    assert rows_of(program.folder / "one")[0]["note"] == ""

    done = program("predict", "--ckpt", trained, "--images", own, "--run-dir", "all", "--devices", 2)
    assert done.code == 0, done.err
    lines = dict(re.findall(r"/(\w+)\.png -> (.*)", done.out))
    assert lines["blank"] == lines["noise"] == "no ink"
    notes = {Path(row["file"]).stem: row["note"] for row in rows_of(program.folder / "all")}
    assert [name for name, note in notes.items() if not note] == ["one"]
    assert all(lines[name].endswith(note) for name, note in notes.items())
