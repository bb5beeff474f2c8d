"""The files of the example of segmentation: they match torchvision, and damaged files are named."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import signal
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import forked, wait_for
from lightning.pytorch.trainer.states import TrainerFn
from PIL import Image
from segmentation import SegmentationData, shapes, verification
from segmentation.images import IGNORED, MEAN, STD, random_crop, read_image, read_mask
from segmentation.module import LitSegmenter
from segmentation.palette import PALETTE, palette_png, tint
from segmentation.shapes import make_image
from segmentation.voc import IMAGES, LISTS, MASKS, download_voc2012
from torchvision.datasets import VOCSegmentation
from voc_folder import ONLY_BORDER, write_voc

from lit_mnist.errors import InputError

SIDE = 32
# SHA-256 of the pixels of the first eight shapes, before encoding.
FIRST_EIGHT = "ddca203b522b50a1afbe803ab3eaaecca68fd26157ecc71fc72da708cb4fe306"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_voc(tmp_path)


def prepared(root: Path, **arguments: object) -> SegmentationData:
    """Returns the data after both steps of a Trainer."""
    options = {"name": "voc2012", "image_size": SIDE, "batch_size": 4, "val_size": 0, **arguments}
    data = SegmentationData(root=str(root), **options)  # type: ignore[arg-type]
    data.prepare_data()
    data.setup("fit")
    return data


def batches(data: SegmentationData, epoch: int = 0, first: int = 0) -> list[list[torch.Tensor]]:
    loader = data.train_dataloader()
    loader.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]
    loader.batch_sampler.seek(first)  # type: ignore[union-attr]
    return list(loader)


def test_images_match_torchvision(folder: Path, tmp_path: Path) -> None:
    data = prepared(tmp_path)
    assert len(data.class_names) == 21
    for dataset, split in ((data.train, "train"), (data.test, "val")):
        known = VOCSegmentation(str(tmp_path), year="2012", image_set=split)
        assert len(known) == len(dataset) > 0
        for number, (image, mask) in enumerate(known):
            assert np.array_equal(np.asarray(image), np.asarray(read_image(dataset.split.images[number])))
            assert np.array_equal(np.asarray(mask), np.asarray(read_mask(dataset.split.masks[number], 21)))


@pytest.mark.parametrize("place", [".", "VOCdevkit", "VOCdevkit/VOC2012"])
def test_the_folder_is_found_from_its_parents(folder: Path, tmp_path: Path, place: str) -> None:
    data = prepared(tmp_path / place)
    assert (len(data.train), len(data.test)) == (16, 6)
    assert data.train.split.images[0].resolve() == (folder / IMAGES / "2007_000000.jpg").resolve()


def test_batches_contain_whole_resized_images(folder: Path, tmp_path: Path) -> None:
    data = prepared(tmp_path, eval_batch_size=2)
    images, targets, indices = list(data.test_dataloader())[1]
    assert (images.dtype, images.shape) == (torch.uint8, (2, 3, SIDE, SIDE))
    assert (targets.dtype, targets.shape) == (torch.uint8, (2, SIDE, SIDE))
    assert indices.tolist() == [2, 3]
    image = read_image(data.test.split.images[3]).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    assert np.array_equal(images[1].permute(1, 2, 0).numpy(), np.asarray(image))
    mask = read_mask(data.test.split.masks[3], 21).resize((SIDE, SIDE), Image.Resampling.NEAREST)
    assert np.array_equal(targets[1].numpy(), np.asarray(mask))
    module, seen = LitSegmenter(21).eval(), []
    module.net.register_forward_hook(lambda _, given, result: seen.append(given[0]))
    module(images)
    share = images.double() / 255
    expected = (share - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    torch.testing.assert_close(seen[0].double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_crop_is_a_function_of_seed_epoch_and_sample(folder: Path, tmp_path: Path, workers: int) -> None:
    whole = batches(prepared(tmp_path, augment="crop"))
    resumed = batches(prepared(tmp_path, augment="crop", workers=workers), first=2)
    assert (len(whole), len(resumed)) == (4, 2)
    for one, other in zip(whole[2:], resumed, strict=True):
        assert all(map(torch.equal, one, other))
    by_sample = {int(i): image for images, _, indices in whole for i, image in zip(indices, images, strict=True)}
    for images, _, indices in batches(prepared(tmp_path, augment="crop"), epoch=1):
        for index, image in zip(indices.tolist(), images, strict=True):
            assert index not in by_sample or not torch.equal(by_sample[index], image)


def test_a_crop_scales_mirrors_and_ignores_its_margin() -> None:
    image = Image.new("RGB", (80, 60), (255, 0, 0))
    mask = Image.new("L", (80, 60), 7)
    shares, first_columns = [], set()
    half = Image.fromarray(np.repeat([[1] * 40 + [2] * 40], 60, axis=0).astype(np.uint8))
    for index in range(200):
        page, targets = random_crop(image, mask, index, size=SIDE, seed=1, epoch=0)
        pixels, classes = np.asarray(page), np.asarray(targets)
        assert pixels.shape == (SIDE, SIDE, 3)
        assert set(np.unique(classes)) <= {7, IGNORED}
        assert np.array_equal(classes == 7, (pixels == (255, 0, 0)).all(axis=-1))
        assert (pixels[classes == IGNORED] == (124, 116, 104)).all()
        shares.append((classes == 7).mean())
        seen = np.asarray(random_crop(image, half, index, size=SIDE, seed=1, epoch=0)[1])
        first_columns.add(int(seen[seen != IGNORED][0]))
    assert min(shares) < 0.3
    # Two of three scales are above 1, and leave no margin.
    assert 0.55 < np.mean(np.array(shares) == 1) < 0.8
    assert first_columns == {1, 2}


@pytest.mark.parametrize(("border", "found"), [("ignore", IGNORED), ("class", 21)])
def test_the_border_is_ignored_or_a_class_of_its_own(folder: Path, tmp_path: Path, border: str, found: int) -> None:
    data = prepared(tmp_path, border=border)
    assert len(data.class_names) == (22 if border == "class" else 21)
    assert data.train[ONLY_BORDER][1].unique().tolist() == [found]


def png(depth: int, color: int, width: int = 61, height: int = 47) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 5000))
        + chunk(b"IEND", b"")
    )


def saved(image: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


IMAGE, MASK = IMAGES / "2007_000000.jpg", MASKS / "2007_000000.png"
# What is written over a file, given its content; None removes it. Then what the message says beside the file's name.
DAMAGES: dict[str, tuple[Path, Callable[[bytes], bytes] | None, str]] = {
    "no image": (IMAGE, None, "the image that train.txt names cannot be found"),
    "no mask": (MASK, None, "the mask that train.txt names cannot be found"),
    "a cut JPEG": (IMAGE, lambda content: content[: len(content) // 2], "damaged"),
    "an empty JPEG": (IMAGE, lambda _: b"", "empty"),
    "no JPEG": (IMAGE, lambda _: saved(Image.new("RGB", (61, 47)), "PNG"), "not an image in a known format"),
    "a cut PNG": (MASK, lambda content: content[: len(content) // 2], "damaged"),
    "a flipped bit": (MASK, lambda content: content[:-20] + bytes([content[-20] ^ 1]) + content[-19:], "damaged"),
    "class 30": (MASK, lambda _: saved(Image.new("L", (61, 47), 30), "PNG"), "2867 pixels are of class 30"),
    "class 21": (MASK, lambda _: saved(Image.new("L", (61, 47), 21), "PNG"), "the classes are 0 to 20, and 255"),
    "a mask in colors": (MASK, lambda _: saved(Image.new("RGB", (61, 47)), "PNG"), "not a mask, but a PNG of RGB"),
    "a mask of 4 bits of grey": (MASK, lambda _: png(4, 0), "not a mask, but a PNG of L values with 4 bits"),
    "a mask of 16 bits": (MASK, lambda _: png(16, 0), "16 bits"),
    "a JPEG as mask": (MASK, lambda _: saved(Image.new("L", (61, 47)), "JPEG"), "not an image in a known format"),
    "another size": (MASK, lambda _: saved(Image.new("L", (47, 61)), "PNG"), "has 47 x 61 pixels"),
    "a bomb": (MASK, lambda _: png(8, 0, 50_000, 50_000), "megapixels"),
    "a smaller bomb": (MASK, lambda _: png(8, 0, 10_000, 6_000), "megapixels"),
    "a way out": (LISTS / "train.txt", lambda content: content + b"../../secret\n", "'../../secret' is not a name"),
    "a place": (LISTS / "val.txt", lambda content: content + b"/etc/passwd\n", "'/etc/passwd' is not a name"),
    "a name twice": (LISTS / "train.txt", lambda content: content + b"2007_000001\n", "names 2007_000001 twice"),
    "an empty list": (LISTS / "val.txt", lambda _: b"\n", "names no image"),
    "no list": (LISTS / "val.txt", None, "cannot be read"),
    "a list that is no text": (LISTS / "val.txt", lambda _: b"\xff\xfe", "not text"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_message_names_each_damaged_file(folder: Path, tmp_path: Path, name: str) -> None:
    place, change, message = DAMAGES[name]
    path = folder / place
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))
    with pytest.raises(InputError) as caught:
        prepared(tmp_path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pipe_is_rejected(folder: Path, tmp_path: Path) -> None:
    (folder / IMAGE).unlink()
    os.mkfifo(folder / IMAGE)
    with pytest.raises(InputError, match="the image is not a regular file"):
        prepared(tmp_path)


def test_valid_files_are_checked_again_only_after_a_change(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Path] = []

    def check(image: Path, mask: Path, num_classes: int) -> None:
        checked.append(image)
        check_image(image, mask, num_classes)

    check_image = verification.check_image
    monkeypatch.setattr(verification, "check_image", check)
    for count in (22, 22):
        prepared(tmp_path)
        assert len(checked) == count
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved / "VOC2012")
    prepared(moved)
    assert len(checked) == 44
    (folder.parent / ".VOC2012.verified.json").write_text('{"stamp": 3}')
    prepared(tmp_path)
    assert len(checked) == 66
    Image.new("L", (61, 47), 3).save(folder / MASK)
    prepared(tmp_path)
    assert len(checked) == 88


def test_the_archive_is_extracted_completely_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def download(root: str, **options: object) -> None:
        calls.append(root)
        write_voc(Path(root))
        if len(calls) == 1:
            raise OSError("the network is gone")

    monkeypatch.setattr("torchvision.datasets.VOCSegmentation", download)
    with pytest.raises(OSError, match="the network is gone"):
        download_voc2012(tmp_path)
    assert not (tmp_path / "VOCdevkit").exists()
    for _ in range(2):
        download_voc2012(tmp_path)
    assert len(calls) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["VOCdevkit"]


def test_split_sizes_are_those_that_were_asked_for(folder: Path, tmp_path: Path) -> None:
    data = prepared(tmp_path, val_size=5, train_size=8, test_size=2)
    assert [len(part) for part in (data.train, data.val, data.test)] == [8, 5, 2]
    assert not set(data.train.split.images) & set(data.val.split.images)
    with pytest.raises(InputError, match="leaves none of 16"):
        prepared(tmp_path, val_size=16)


def test_user_images_are_listed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("folder/b.png", "folder/a.png", "c.png"):
        Image.new("RGB", (30, 20)).save(tmp_path / name)
    data = SegmentationData(root=str(tmp_path), images=[str(tmp_path / "c.png"), str(tmp_path / "folder")])
    data.trainer = SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.PREDICTING), world_size=1)  # type: ignore[assignment]
    data.prepare_data()
    data.setup("predict")
    assert [path.name for path in data.predict.split.images] == ["c.png", "a.png", "b.png"]
    assert [batch[0].shape for batch in data.predict_dataloader()] == [(1, 3, 256, 256)] * 3


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the shapes few and small, also in the processes that are forked."""
    for name, value in (("TRAIN", 40), ("TEST", 12), ("SIDE", 48)):
        monkeypatch.setattr(shapes, name, value)


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
    assert counts[len(shapes.CLASSES) : IGNORED].sum() == 0
    assert (shares[:7] > 0.015).all()
    assert 0.5 < shares[0] < 0.8
    assert 0.02 < shares[IGNORED] < 0.1


@pytest.mark.usefixtures("few")
def test_the_shapes_are_generated_once_and_read_as_voc(tmp_path: Path) -> None:
    first = prepared(tmp_path, name="shapes")
    folder = tmp_path / shapes.NAME
    assert (len(first.train), len(first.test)) == (40, 12)
    assert first.class_names == ("background", "circle", "square", "triangle", "star", "ring", "cross")
    with Image.open(first.train.split.images[0]) as image, Image.open(first.train.split.masks[0]) as mask:
        assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (48, 48))
        assert (mask.format, mask.mode, mask.size) == ("PNG", "P", (48, 48))
    made = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    prepared(tmp_path, name="shapes")
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == made
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".{shapes.NAME}.verified.json", shapes.NAME]


@pytest.mark.usefixtures("few")
def test_partial_shapes_of_a_killed_process_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, data = tmp_path / "gate", tmp_path / "data"

    def wait_and_make(*, seed: int, number: int, side: int) -> tuple[np.ndarray, np.ndarray]:
        if number >= 5:
            wait_for(gate.exists, 60)
        return make_image(seed=seed, number=number, side=side)

    monkeypatch.setattr(shapes, "make_image", wait_and_make)
    with forked(lambda: len(prepared(data, name="shapes").train), tmp_path) as child:
        wait_for(lambda: len(list(data.glob(f".{shapes.NAME}-*/*/JPEGImages/*.jpg"))) == 5, 60)
        os.kill(child, signal.SIGKILL)
    assert not (data / shapes.NAME).exists()
    gate.touch()
    assert len(prepared(data, name="shapes").train) == 40


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("kind", ["damaged", "replaced"])
def test_other_files_than_the_generated_shapes_are_rejected(tmp_path: Path, kind: str) -> None:
    prepared(tmp_path, name="shapes")
    masks = tmp_path / shapes.NAME / "SegmentationClass"
    content = (masks / ("000003.png" if kind == "damaged" else "000004.png")).read_bytes()
    (masks / "000003.png").write_bytes(content[:50] if kind == "damaged" else content)
    found = r"000003\.png.*" if kind == "damaged" else "are not the generated shapes.*"
    with pytest.raises(InputError, match=f"{found}Delete .*shapes-1 to have the shapes generated again"):
        prepared(tmp_path, name="shapes")


def test_message_names_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot be written to .*file.*data\.root"):
        prepared(tmp_path / "file", name="shapes")


def test_the_palette_is_that_of_voc() -> None:
    known = {0: (0, 0, 0), 1: (128, 0, 0), 2: (0, 128, 0), 7: (128, 128, 128), 8: (64, 0, 0)}
    known |= {15: (192, 128, 128), 20: (0, 64, 128), 255: (224, 224, 192)}
    for number, color in known.items():
        assert tuple(PALETTE[number]) == color
    assert len({tuple(color) for color in PALETTE}) == 256


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
