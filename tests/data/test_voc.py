"""Images in the folders of VOC: they match torchvision, damaged files are named, and training resumes exactly."""

from __future__ import annotations

import dataclasses
import io
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Program, as_nobody, result_of
from PIL import Image
from processes import assert_rejected
from torchvision.datasets import VOCSegmentation
from voc_folder import ONLY_BORDER, write_voc

from lit_mnist.data.dataset import IGNORED, Dataset, class_names, load_dataset
from lit_mnist.data.loader import Batch, EvaluationBatches, TrainBatches
from lit_mnist.data.segmentation import verification
from lit_mnist.data.segmentation.split import MEAN, STD, SegmentationSplit, random_crop, read_image, read_mask
from lit_mnist.data.segmentation.voc import IMAGES, LISTS, MASKS
from lit_mnist.errors import InputError
from lit_mnist.experiment import DataSettings, Experiment
from lit_mnist.experiment.plan import make_plan

SIDE = 32
SMALL: tuple[object, ...] = (
    *("--data.name", "voc2012", "--model.net", "deeplabv3_small", "--data.image_size", SIDE, "--data.augment", "crop"),
    *("--data.val_size", 4, "--batch-size", 4, "--precision", "32-true", "--devices", 2, "--run.threads", 1),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lit_mnist"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_voc(tmp_path)


def settings_of(root: Path, **changes: object) -> DataSettings:
    return dataclasses.replace(DataSettings(name="voc2012", root=str(root), image_size=SIDE), **changes)  # type: ignore[arg-type]


def images_of(dataset: Dataset) -> tuple[SegmentationSplit, SegmentationSplit]:
    assert isinstance(dataset.train, SegmentationSplit)
    assert isinstance(dataset.test, SegmentationSplit)
    return dataset.train, dataset.test


def train_batches(root: Path, *, first: int = 0, epoch: int = 0, rank: int = 0, **changes: object) -> list[Batch]:
    data = settings_of(root, batch_size=4, augment="crop", val_size=0, **changes)
    experiment = Experiment(data=data).replace("trainer", max_epochs=3)
    split = load_dataset(data).train
    plan = make_plan(experiment, 2, len(split))
    return list(TrainBatches(split, plan=plan, settings=data, seed=42, epoch=epoch, rank=rank, first=first))


def test_images_match_torchvision(folder: Path, tmp_path: Path) -> None:
    dataset = load_dataset(settings_of(tmp_path))
    assert dataset.class_names == class_names(DataSettings(name="voc2012"))
    assert dataset.num_classes == 21
    for images, split in zip(images_of(dataset), ("train", "val"), strict=True):
        known = VOCSegmentation(str(tmp_path), year="2012", image_set=split)
        assert len(known) == len(images) > 0
        for number, (image, mask) in enumerate(known):
            assert np.array_equal(np.asarray(image), np.asarray(read_image(images.images[number])))
            assert np.array_equal(np.asarray(mask), np.asarray(read_mask(images.masks[number], 21)))


@pytest.mark.parametrize("place", [".", "VOCdevkit", "VOCdevkit/VOC2012"])
def test_the_folder_is_found_from_its_parents(folder: Path, tmp_path: Path, place: str) -> None:
    train, test = images_of(load_dataset(settings_of(tmp_path / place)))
    assert (len(train), len(test)) == (16, 6)
    assert train.images[0].resolve() == (folder / IMAGES / "2007_000000.jpg").resolve()


def test_batches_contain_whole_resized_images(folder: Path, tmp_path: Path) -> None:
    data = settings_of(tmp_path)
    split = load_dataset(data).test
    batches = EvaluationBatches(split, rank=1, world_size=2, batch_size=2, settings=data, dtype=torch.float64)
    first = next(iter(batches))
    assert first.images.shape == (2, 3, SIDE, SIDE)
    assert first.images.dtype == torch.float64
    assert first.targets.shape == (2, SIDE, SIDE)
    assert first.targets.dtype == torch.int64
    assert first.indices.tolist() == [3, 4]
    image = read_image(split.images[3]).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    share = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).double() / 255
    expected = (share - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    torch.testing.assert_close(first.images[0], expected, rtol=0, atol=1e-6)
    mask = np.asarray(read_mask(split.masks[3], 21).resize((SIDE, SIDE), Image.Resampling.NEAREST))
    assert np.array_equal(first.targets[0].numpy(), mask)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_crop_is_a_function_of_seed_epoch_and_sample(folder: Path, tmp_path: Path, workers: int) -> None:
    whole = train_batches(tmp_path)
    resumed = train_batches(tmp_path, first=2, workers=workers)
    assert len(whole) == 4
    assert len(resumed) == 2
    for one, other in zip(whole[2:], resumed, strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.targets, other.targets)
        assert torch.equal(one.indices, other.indices)
        assert one.rng is not None
        assert other.rng is not None
        assert one.rng[:3] == other.rng[:3]
    by_sample = {int(i): image for batch in whole for i, image in zip(batch.indices, batch.images, strict=True)}
    for batch in train_batches(tmp_path, epoch=1):
        for index, image in zip(batch.indices.tolist(), batch.images, strict=True):
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
    data = settings_of(tmp_path, border=border)
    dataset = load_dataset(data)
    assert dataset.num_classes == (22 if border == "class" else 21)
    train, _ = images_of(dataset)
    only_border = train.take(np.array([ONLY_BORDER]))
    batch = next(iter(EvaluationBatches(only_border, rank=0, world_size=1, batch_size=1, settings=data)))
    assert batch.targets.unique().tolist() == [found]


def png(depth: int, colour: int, width: int = 61, height: int = 47) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
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
    "a mask in colours": (MASK, lambda _: saved(Image.new("RGB", (61, 47)), "PNG"), "not a mask, but a PNG of RGB"),
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
        load_dataset(settings_of(tmp_path))
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pipe_is_rejected(folder: Path, tmp_path: Path) -> None:
    (folder / IMAGE).unlink()
    os.mkfifo(folder / IMAGE)
    with pytest.raises(InputError, match="the image is not a regular file"):
        load_dataset(settings_of(tmp_path))


def test_message_states_where_missing_files_are_expected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"VOCdevkit/VOC2012.*JPEGImages.*data\.root.*--data\.download true"):
        load_dataset(settings_of(tmp_path))


@pytest.mark.parametrize("name", ["no mask", "class 30"])
def test_a_wrong_file_ends_the_command_before_a_rank_starts(
    folder: Path, tmp_path: Path, program: Program, name: str
) -> None:
    place, change, message = DAMAGES[name]
    if change is None:
        (folder / place).unlink()
    else:
        (folder / place).write_bytes(change(b""))
    assert_rejected(
        program(*SMALL, "--data.root", tmp_path, "--run-dir", tmp_path / "run"), str(folder / place), message
    )
    assert not (tmp_path / "run").exists()


def test_valid_files_are_checked_again_only_after_a_change(
    folder: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Path] = []

    def check(image: Path, mask: Path, num_classes: int) -> None:
        checked.append(image)
        check_image(image, mask, num_classes)

    check_image = verification.check_image
    monkeypatch.setattr(verification, "check_image", check)
    first = load_dataset(settings_of(tmp_path)).sha256
    assert len(checked) == 22
    assert load_dataset(settings_of(tmp_path)).sha256 == first
    assert len(checked) == 22
    # The same folder, reached on another way, at another place, has the same digest.
    assert load_dataset(settings_of(folder)).sha256 == first
    assert len(checked) == 22
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved / "VOC2012")
    assert load_dataset(settings_of(moved)).sha256 == first
    assert len(checked) == 44
    for memory in (cache / "checked").glob("*.json"):
        memory.write_text('{"stamp": 3}')
    assert load_dataset(settings_of(tmp_path)).sha256 == first
    assert len(checked) == 66
    Image.new("L", (61, 47), 3).save(folder / MASK)
    assert load_dataset(settings_of(tmp_path)).sha256 != first
    assert len(checked) == 88


def test_without_a_cache_each_start_repeats_the_check_with_a_note(
    open_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_voc(open_folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(open_folder / "cache"))
    with as_nobody():
        found = load_dataset(settings_of(open_folder)).sha256
    assert "cannot be recorded" in capsys.readouterr().err
    assert load_dataset(settings_of(open_folder)).sha256 == found


def test_odd_images_train_on_two_ranks_and_resume_exactly_with_workers(
    folder: Path, tmp_path: Path, program: Program
) -> None:
    whole = program.train(*SMALL, "--data.root", tmp_path, "--epochs", 2, "--data.workers", 2)
    result = result_of(whole)
    assert result["steps"] == 6
    assert result["test"]["count"] == 6
    assert 0 < result["test"]["mean_iou"] < 1
    again = program.train(
        *(*SMALL, "--data.root", tmp_path, "--epochs", 2, "--data.workers", 2, "--run.keep", 9),
        *("--save-every", 1, "--inject", "kill:rank=1,step=5", "--max-restarts", 1),
    )
    assert result_of(again)["weights_sha256"] == result["weights_sha256"]
    assert result_of(again)["test"] == result["test"]
    other = program.train(*SMALL, "--data.root", tmp_path, "--epochs", 2, engine="raw_ddp")
    assert result_of(other)["weights_sha256"] == result["weights_sha256"]


@pytest.mark.parametrize("engine", ["lightning", "raw_ddp"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_damaged_during_the_run_ends_it_with_one_message(
    folder: Path, tmp_path: Path, program: Program, engine: str, workers: int
) -> None:
    load_dataset(settings_of(tmp_path))
    path = folder / IMAGE
    # Size and time stay the same, so that the record still counts as valid, as after a disk fault.
    found = path.stat()
    path.write_bytes(b"\0" * found.st_size)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    run = ("--data.root", tmp_path, "--data.workers", workers, "--run-dir", tmp_path / "run")
    program.may_write = True
    assert_rejected(program(*SMALL, *run, engine=engine), str(path), "not an image in a known format (JPEG)")
