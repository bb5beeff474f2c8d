"""Predictions of segmentation images: a mask and an overlay for each, identical on any number of ranks."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Program, result_of
from PIL import Image
from processes import assert_rejected
from voc_folder import write_voc

from lit_mnist.data.dataset import class_names
from lit_mnist.data.segmentation.palette import PALETTE, palette_png, tint
from lit_mnist.data.segmentation.split import SegmentationSplit
from lit_mnist.experiment import DataSettings
from lit_mnist.predict.segmentation import load_user_images, unique_names, write_masks
from lit_mnist.training.examples import KEPT, Scored, best_and_worst, image_scores

VOC = class_names(DataSettings(name="voc2012"))


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place))
        yield place


@pytest.fixture(scope="module")
def trained(shared_program: Program, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of a few steps on a small VOC, which is gone afterwards."""
    root = tmp_path_factory.mktemp("voc")
    write_voc(root, train=16, test=15)
    return shared_program.train(
        *("--data.name", "voc2012", "--data.root", root, "--model.net", "deeplabv3_small", "--data.image_size", 32),
        *("--data.val_size", 4, "--batch-size", 4, "--epochs", 4, "--lr", 0.05, "--precision", "32-true"),
        *("--devices", 1, "--run.threads", 1),
    )


def table_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "predictions.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def contents(folder: Path) -> dict[str, bytes]:
    places = (folder / "masks", folder / "overlays")
    return {str(path.relative_to(folder)): path.read_bytes() for place in places for path in place.iterdir()}


def test_the_masks_of_the_test_set_are_the_same_on_any_number_of_ranks(
    trained: Path, program: Program, tmp_path: Path
) -> None:
    def predicted(devices: int, engine: str) -> tuple[list[dict[str, str]], dict[str, bytes]]:
        place = tmp_path / f"{engine}-{devices}"
        run = ("--ckpt", trained, "--devices", devices, "--run-dir", place, "--run.threads", 1)
        done = program("predict", *run, "--data.root", result_of(trained)["config"]["data"]["root"], engine=engine)
        assert done.code == 0, done.out + done.err
        assert "predicted 15 images" in done.out
        return table_of(place), contents(place)

    table, files = predicted(1, "lightning")
    assert [row["index"] for row in table] == [str(number) for number in range(15)]
    assert len(files) == 30
    classes = set()
    for row in table:
        with Image.open(row["file"]) as image, Image.open(tmp_path / "lightning-1" / row["mask"]) as mask:
            assert mask.mode == "P"
            assert mask.size == image.size == (int(row["width"]), int(row["height"]))
            values = np.asarray(mask)
        classes |= set(np.unique(values).tolist())
        shares = [float(row[name]) for name in VOC]
        assert sum(shares) == pytest.approx(1, abs=1e-4)
        assert shares == pytest.approx([(values == number).mean() for number in range(21)], abs=1e-6)
        assert 0 < float(row["probability"]) <= 1
    assert classes <= set(range(21))
    for devices, engine in ((2, "lightning"), (3, "raw_ddp")):
        assert predicted(devices, engine) == (table, files)


def test_user_images_are_predicted_without_the_data_set(trained: Path, program: Program, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    wide = Image.fromarray(np.random.default_rng(1).integers(0, 255, (40, 90, 3), dtype=np.uint8))
    wide.save(own / "a.png")
    turned = Image.Exif()
    turned[274] = 6
    wide.save(own / "turned.jpg", exif=turned)
    wide.convert("RGBA").save(own / "a.webp")
    run = ("--ckpt", trained, "--images", own, "--run-dir", tmp_path / "run", "--devices", 2)
    done = program("predict", *run, "--data.root", tmp_path / "gone")
    assert done.code == 0, done.out + done.err
    rows = table_of(tmp_path / "run")
    assert [(row["file"], row["mask"], row["width"], row["height"]) for row in rows] == [
        (str(own / "a.png"), "masks/a-0.png", "90", "40"),
        (str(own / "a.webp"), "masks/a-1.png", "90", "40"),
        (str(own / "turned.jpg"), "masks/turned.png", "40", "90"),
    ]
    with Image.open(tmp_path / "run" / "overlays" / "turned.jpg") as overlay:
        assert (overlay.format, overlay.size) == ("JPEG", (40, 90))


def test_an_unreadable_image_is_rejected_before_anything_is_written(
    trained: Path, program: Program, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(b"\xff\xd8\xff\xe0 no image")
    assert_rejected(program("predict", "--ckpt", trained, "--images", bad, "--run-dir", tmp_path / "run"), str(bad))
    assert not (tmp_path / "run").exists()


def test_a_folder_with_masks_is_not_written_into(trained: Path, program: Program, tmp_path: Path) -> None:
    (tmp_path / "run" / "masks").mkdir(parents=True)
    Image.new("RGB", (30, 30)).save(tmp_path / "own.png")
    run = ("--ckpt", trained, "--images", tmp_path / "own.png", "--run-dir", tmp_path / "run")
    assert_rejected(program("predict", *run), "masks")


def test_the_report_shows_classes_curves_and_images(trained: Path) -> None:
    page = (trained / "report.html").read_text()
    test = result_of(trained)["test"]
    head = re.search(r"<h1>([\d.]+)<small>.%</small> <span>(.*?)</span>", page)
    assert head is not None
    assert head[1] == f"{100 * test['mean_iou']:.2f}"
    assert head[2] == "test mean IoU"
    assert "<h3>Mean IoU</h3>" in page
    assert page.count('<figure class="example">') == 2 * KEPT
    # A image, its true classes and its predicted ones.
    assert page.count("data:image/jpeg;base64,") == 3 * 2 * KEPT
    assert "In percent of the true class" in page
    for name in VOC:
        assert f">{name}</span>" in page
    for share in test["iou"]:
        assert share is None or f"<b>{100 * share:.2f}" in page
    assert "<script" not in page


def test_a_mask_is_enlarged_smoothly_to_the_size_of_the_image(tmp_path: Path) -> None:
    Image.new("RGB", (200, 100), "white").save(tmp_path / "wide.png")
    small = np.zeros((1, 8, 8), np.uint8)
    small[0, :, 4:] = 3
    small[0, 3:5, 3:5] = 21
    settings = DataSettings(name="voc2012", border="class")
    batch = (torch.tensor([0]), torch.from_numpy(small), torch.tensor([0.75]))
    split = load_user_images([tmp_path / "wide.png"], settings).test
    ((index, probability, width, height, *shares),) = write_masks(tmp_path, split, [batch], settings)
    with Image.open(tmp_path / "masks" / "wide.png") as image:
        mask = np.asarray(image)
    assert mask.shape == (100, 200)
    # The predicted border is what a border is in VOC's files.
    assert set(np.unique(mask)) == {0, 3, 255}
    assert (mask[:25, :100] == 0).all()
    assert (mask[:25, 100:] == 3).all()
    assert mask[50, 100] == 255
    assert shares[21] == (mask == 255).mean()
    assert (index, probability, width, height) == (0, 0.75, 200, 100)


def test_output_names_are_unique() -> None:
    files = [Path(name) for name in ("a/x.jpg", "b/x.png", "x-1.png", "y.png", "c/x.gif", "x-1-1.png")]
    names = unique_names(files)
    assert names[2:4] == ["x-1", "y"]
    assert len(set(names)) == len(names)
    assert "x" not in names


def test_the_palette_is_that_of_voc() -> None:
    known = {0: (0, 0, 0), 1: (128, 0, 0), 2: (0, 128, 0), 7: (128, 128, 128), 8: (64, 0, 0)}
    known |= {15: (192, 128, 128), 20: (0, 64, 128), 255: (224, 224, 192)}
    for number, colour in known.items():
        assert tuple(PALETTE[number]) == colour
    assert len({tuple(colour) for colour in PALETTE}) == 256


def test_the_pixels_of_a_mask_are_the_classes(tmp_path: Path) -> None:
    mask = np.arange(256, dtype=np.uint8).reshape(16, 16)
    (tmp_path / "mask.png").write_bytes(palette_png(mask))
    with Image.open(tmp_path / "mask.png") as image:
        assert image.mode == "P"
        assert np.array_equal(np.asarray(image), mask)
        assert image.convert("RGB").getpixel((15, 0)) == (192, 128, 128)


def test_an_overlay_tints_objects_and_leaves_the_rest() -> None:
    image = np.full((6, 6, 3), 100, np.uint8)
    mask = np.zeros((6, 6), np.uint8)
    mask[1:6, 1:6] = 1
    shown = tint(image, mask)
    assert (shown[0] == 100).all()
    assert (shown[1, 1:] == PALETTE[1]).all()
    assert (shown[3, 3] == (114, 50, 50)).all()


def test_images_are_scored_one_by_one() -> None:
    truth = torch.tensor([[[0, 0], [1, 1]], [[0, 255], [2, 2]], [[255, 255], [255, 255]]])
    predicted = torch.tensor([[[0, 0], [1, 1]], [[0, 1], [2, 0]], [[0, 1], [2, 0]]])
    scores = image_scores(predicted, truth, 3)
    # The second: of class 0 one of two pixels, of class 2 one of two; the pixel without a class counts nowhere.
    assert scores[:2].tolist() == [1.0, 0.5]
    assert scores[2].isnan()


def test_the_best_and_the_worst_are_kept_each_once() -> None:
    blank = np.zeros((1, 1), np.uint8)
    scored = [Scored(number, (number * 7 % 40) / 40, blank) for number in range(40)]
    kept = best_and_worst(best_and_worst(scored[:20]) + best_and_worst(scored[20:]))
    assert kept == best_and_worst(scored)
    assert [round(40 * image.score) for image in kept] == [39, 38, 37, 36, 35, 34, 5, 4, 3, 2, 1, 0]
    assert len(best_and_worst(scored[:3])) == 3


def test_user_images_have_no_masks(tmp_path: Path) -> None:
    images = SegmentationSplit((tmp_path / "a", tmp_path / "b", tmp_path / "c"), ())
    taken = images.take(np.array([2, 0]))
    assert taken.images == (tmp_path / "c", tmp_path / "a")
    assert taken.masks == ()
