"""The shapes: the same pixels on every machine, generated once and completely, and read as VOC."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from conftest import forked, wait_for
from PIL import Image

from lit_mnist.data.dataset import IGNORED, Dataset, SegmentationSplit, class_names, load_dataset
from lit_mnist.data.segmentation import shapes
from lit_mnist.data.segmentation.shapes import make_image
from lit_mnist.errors import InputError
from lit_mnist.experiment import DataSettings

# SHA-256 of the pixels of the first eight images, before encoding.
FIRST_EIGHT = "ddca203b522b50a1afbe803ab3eaaecca68fd26157ecc71fc72da708cb4fe306"


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the set a small one, also in the processes that are forked."""
    for name, value in (("TRAIN", 40), ("TEST", 12), ("SIDE", 48)):
        monkeypatch.setattr(shapes, name, value)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lit_mnist"


def load() -> Dataset:
    return load_dataset(DataSettings(name="shapes"))


def ended(child: int) -> int:
    """Returns the exit code of a process, which must end soon."""
    _, status = wait_for(lambda: (found := os.waitpid(child, os.WNOHANG))[0] and found, 60)
    return os.waitstatus_to_exitcode(status)


def test_an_image_has_the_same_pixels_on_every_machine() -> None:
    digest = hashlib.sha256()
    for number in range(8):
        image, mask = make_image(seed=2012, number=number, side=96)
        digest.update(image.tobytes() + mask.tobytes())
    assert digest.hexdigest() == FIRST_EIGHT


def test_images_show_every_class_within_a_border_of_one_pixel() -> None:
    counts = np.zeros(256, np.int64)
    for number in range(100):
        image, mask = make_image(seed=3, number=number, side=96)
        assert image.shape == (96, 96, 3)
        assert image.dtype == mask.dtype == np.uint8
        counts += np.bincount(mask.ravel(), minlength=256)
        # Where two pixels side by side differ, at least one of them is of no class.
        for one, other in ((mask[1:], mask[:-1]), (mask[:, 1:], mask[:, :-1])):
            assert ((one == other) | (one == IGNORED) | (other == IGNORED)).all()
    shares = counts / counts.sum()
    assert counts[len(class_names(DataSettings(name="shapes"))) : IGNORED].sum() == 0
    assert (shares[:7] > 0.015).all()
    assert 0.5 < shares[0] < 0.8
    assert 0.02 < shares[IGNORED] < 0.1


@pytest.mark.usefixtures("few")
def test_the_data_set_is_generated_once_and_read_as_voc(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = load()
    folder = cache / shapes.NAME
    assert isinstance(first.train, SegmentationSplit)
    assert (len(first.train), len(first.test)) == (40, 12)
    assert first.class_names == ("background", "circle", "square", "triangle", "star", "ring", "cross")
    assert str(folder) in first.source
    with Image.open(first.train.images[0]) as image, Image.open(first.train.masks[0]) as mask:
        assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (48, 48))
        assert (mask.format, mask.mode, mask.size) == ("PNG", "P", (48, 48))
    made = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert load().sha256 == first.sha256
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == made
    assert sorted(path.name for path in cache.iterdir()) == [".download.lock", "checked", shapes.NAME]
    # The same set, elsewhere, has the same digest.
    assert load_dataset(DataSettings(name="shapes", root=str(cache / "other"))).sha256 == first.sha256
    assert capsys.readouterr().err == ""


@pytest.fixture
def gate(few: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that a process waits for before it generates the sixth image."""

    def wait_and_make(*, seed: int, number: int, side: int) -> tuple[np.ndarray, np.ndarray]:
        if number >= 5:
            wait_for(gate.exists, 60)
        return make_image(seed=seed, number=number, side=side)

    gate = tmp_path / "gate"
    monkeypatch.setattr(shapes, "make_image", wait_and_make)
    return gate


def test_partial_files_of_a_killed_process_are_not_used(gate: Path, cache: Path, tmp_path: Path) -> None:
    partial = cache / f".{shapes.NAME}.partial"
    with forked(lambda: len(load().train), tmp_path) as child:
        wait_for(lambda: len(list(partial.glob("JPEGImages/*.jpg"))) == 5, 60)
        os.kill(child, signal.SIGKILL)
    assert not (cache / shapes.NAME).exists()
    gate.touch()
    assert len(load().train) == 40
    assert not partial.exists()


def test_a_second_process_waits_and_generates_nothing(gate: Path, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    with forked(lambda: 0 if len(load().train) == 40 else 1, tmp_path) as first:
        wait_for((cache / f".{shapes.NAME}.partial").exists, 60)
        with forked(lambda: 0 if len(load().train) == 40 else 1, tmp_path / "second") as second:
            said = tmp_path / "second" / "stderr.txt"
            wait_for(
                lambda: said.exists() and "Waiting for another process to generate the shapes" in said.read_text(), 60
            )
            gate.touch()
            assert [ended(child) for child in (first, second)] == [0, 0]
    assert len(list((cache / shapes.NAME / "JPEGImages").iterdir())) == 52


@pytest.mark.usefixtures("few")
def test_a_damaged_file_is_rejected_with_advice(cache: Path) -> None:
    load()
    path = cache / shapes.NAME / "SegmentationClass" / "000003.png"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(InputError, match=r"000003\.png.*Delete .*shapes-1 to have the shapes generated again"):
        load()


@pytest.mark.usefixtures("few")
def test_a_replaced_file_is_detected(cache: Path) -> None:
    load()
    images = cache / shapes.NAME / "JPEGImages"
    (images / "000003.jpg").write_bytes((images / "000004.jpg").read_bytes())
    with pytest.raises(InputError, match="are not the generated shapes"):
        load()


def test_message_names_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"The data cannot be written to .*file.*data\.root"):
        load_dataset(DataSettings(name="shapes", root=str(tmp_path / "file")))
