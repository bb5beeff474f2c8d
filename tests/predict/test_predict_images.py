"""A user's images: every format is read as the same digit, and damaged files are rejected."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import as_nobody
from digit_images import Array, crop_to_ink, load_test_digits
from PIL import Image

from lit_mnist.errors import InputError
from lit_mnist.experiment import DataSettings
from lit_mnist.predict.segmentation import load_user_images
from lit_mnist.predict.table import DigitPrediction, write_table
from lit_mnist.predict.user_images import find_images, read_digits


@pytest.fixture(scope="session")
def digits() -> torch.Tensor:
    return load_test_digits()


def test_mnist_digits_are_unchanged(tmp_path: Path, digits: torch.Tensor) -> None:
    for index, digit in enumerate(digits[:200].numpy()):
        Image.fromarray(digit if index % 2 else 255 - digit).save(tmp_path / f"{index:03}.png")
    distance = (read_digits(find_images([tmp_path])).int() - digits[:200]).abs().amax(dim=(1, 2))
    # The palest pixels count as paper, and where that moves the center of mass, the whole digit moves by a pixel.
    assert (distance < 60).float().mean() > 0.9


def page(box: tuple[int, int, int, int], size: tuple[int, int] = (200, 150)) -> Array:
    """White paper, uint8 [height, width], with a black rectangle: left, top, right, bottom."""
    grey = np.full(size[::-1], 255, np.uint8)
    grey[box[1] : box[3], box[0] : box[2]] = 0
    return grey


@pytest.mark.parametrize("invert", [False, True], ids=["dark", "light"])
@pytest.mark.parametrize(
    ("box", "high", "wide"),
    [((50, 40, 60, 140), 20, 2), ((150, 0, 200, 25), 10, 20), ((0, 110, 40, 150), 20, 20), ((9, 9, 19, 14), 10, 20)],
    ids=["column", "corner", "edge", "small"],
)
def test_the_ink_fills_the_box_keeps_its_aspect_and_is_centered(
    tmp_path: Path, box: tuple[int, int, int, int], high: int, wide: int, invert: bool
) -> None:
    image = page(box)
    Image.fromarray(255 - image if invert else image).save(tmp_path / "a.png")
    (digit,) = read_digits([tmp_path / "a.png"])
    assert digit.dtype == torch.uint8
    assert int((digit > 127).any(dim=1).sum()) == high
    assert abs(int((digit > 127).any(dim=0).sum()) - wide) <= 1
    mass = digit.double() / digit.sum()
    assert abs(float(mass.sum(dim=1) @ torch.arange(28.0).double()) - 14) <= 0.51
    assert abs(float(mass.sum(dim=0) @ torch.arange(28.0).double()) - 14) <= 0.51


def over_paper(ink: Array, hidden: int) -> Image.Image:
    """Black ink with its own opacity; the color under full transparency must not matter."""
    color = np.where(ink > 0, 0, hidden).astype(np.uint8)
    return Image.fromarray(np.stack([color, color, color, ink], axis=2))


def palette(ink: Array, colors: list[int], **more: object) -> Image.Image:
    """Two colors, the second one for ink; the indices do not follow the brightness."""
    image = Image.frombytes("P", ink.shape[::-1], (ink > 127).astype(np.uint8).tobytes())
    image.putpalette(colors)
    image.info.update(more)
    return image


def deep(ink: Array, kind: type, white: float) -> Image.Image:
    return Image.fromarray(((1 - ink / 255) * white).astype(kind))


MODES: dict[str, tuple[str, Callable[[Array], Image.Image]]] = {
    "L": ("png", lambda ink: Image.fromarray(255 - ink)),
    "1": ("png", lambda ink: Image.fromarray(255 - ink).convert("1", dither=Image.Dither.NONE)),
    "RGB": (
        "png",
        lambda ink: Image.merge("RGB", [Image.fromarray(255 - ink // 2), *[Image.fromarray(255 - ink)] * 2]),
    ),
    "RGBA": ("png", lambda ink: Image.fromarray(255 - ink).convert("RGBA")),
    "transparent over black": ("png", lambda ink: over_paper(ink, 0)),
    "transparent over white": ("webp", lambda ink: over_paper(ink, 255)),
    "white on transparent": (
        "png",
        lambda ink: Image.fromarray(np.dstack([np.full((*ink.shape, 3), 255), ink]).astype(np.uint8)),
    ),
    "white drawn on transparent black": ("webp", lambda ink: Image.fromarray(np.dstack([ink, ink, ink, ink]))),
    "light LA": ("png", lambda ink: Image.fromarray(np.dstack([np.full_like(ink, 230), ink]), "LA")),
    "P, white ink, transparent paper": ("gif", lambda ink: palette(ink, [0, 0, 0, 250, 250, 250], transparency=0)),
    "LA": ("png", lambda ink: over_paper(ink, 0).convert("LA")),
    "P": ("png", lambda ink: palette(ink, [250, 250, 240, 20, 0, 60])),
    "P, light ink": ("bmp", lambda ink: palette(ink, [10, 20, 30, 240, 250, 200])),
    "P, transparent paper": ("gif", lambda ink: palette(ink, [0, 0, 0, 9, 9, 9], transparency=0)),
    "CMYK": ("jpg", lambda ink: Image.fromarray(255 - ink).convert("RGB").convert("CMYK")),
    "CMYK, uncompressed": ("tif", lambda ink: Image.fromarray(255 - ink).convert("RGB").convert("CMYK")),
    "YCbCr": ("tiff", lambda ink: Image.fromarray(255 - ink).convert("RGB").convert("YCbCr")),
    "LAB": ("tiff", lambda ink: Image.frombytes("LAB", ink.shape[::-1], np.dstack([255 - ink, ink, ink]).tobytes())),
    "16 bits": ("png", lambda ink: deep(ink, np.uint16, 65535)),
    "12 bits of 16": ("tiff", lambda ink: deep(ink, np.uint16, 4095)),
    "32 bits": ("tiff", lambda ink: deep(ink, np.int32, 1_000_000)),
    "float": ("tiff", lambda ink: deep(ink, np.float32, 1.0)),
}


@pytest.fixture(scope="session")
def large(digits: torch.Tensor) -> Array:
    """The ink of a 7 on a page of 160 x 120, uint8; rotating or mirroring it changes it."""
    ink = Image.fromarray(crop_to_ink(digits[34])).resize((56, 80), Image.Resampling.BICUBIC)
    ink_page = np.zeros((120, 160), np.uint8)
    ink_page[30:110, 80:136] = np.asarray(ink)
    return ink_page


@pytest.fixture(scope="session")
def expected(large: Array, tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    path = tmp_path_factory.mktemp("expected") / "a.png"
    Image.fromarray(255 - large).save(path)
    return read_digits([path])[0]


def distance(path: Path, digit: torch.Tensor) -> float:
    return float((read_digits([path])[0].float() - digit.float()).abs().mean())


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_shows_the_same_digit(tmp_path: Path, large: Array, expected: torch.Tensor, mode: str) -> None:
    suffix, make = MODES[mode]
    path = tmp_path / f"a.{suffix}"
    make(large).save(path, lossless=True) if suffix == "webp" else make(large).save(path)
    # Edges that fade over transparency may move the whole digit by a pixel.
    assert distance(path, expected) < (15 if "transparent black" in mode else 6)
    assert distance(path, expected.flip(0)) > 20


ORIENTATIONS: dict[int, Callable[[Array], Array]] = {
    1: lambda grey: grey,
    2: np.fliplr,
    3: lambda grey: np.rot90(grey, 2),
    4: np.flipud,
    5: lambda grey: grey.T,
    6: np.rot90,
    7: lambda grey: np.rot90(grey, 2).T,
    8: lambda grey: np.rot90(grey, -1),
}


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tiff"])
@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_exif_orientation_is_applied(
    tmp_path: Path, large: Array, expected: torch.Tensor, orientation: int, suffix: str
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(np.ascontiguousarray(ORIENTATIONS[orientation](255 - large))).save(path, exif=exif, quality=90)
    assert distance(path, expected) < 6


def test_uneven_light_is_removed(tmp_path: Path, large: Array, expected: torch.Tensor) -> None:
    grey = 190.0 - 0.5 * large
    grey += np.linspace(-45, 45, grey.shape[1])
    Image.fromarray(grey.astype(np.uint8)).save(tmp_path / "a.png")
    assert distance(tmp_path / "a.png", expected) < 6


def test_a_thin_pen_on_a_large_page_is_as_dark_as_mnist(tmp_path: Path) -> None:
    grey = np.full((1500, 2100), 230, np.uint8)
    grey[300:1200, 1000:1012] = grey[300:312, 600:1012] = 40
    Image.fromarray(grey).save(tmp_path / "a.jpg")
    (digit,) = read_digits([tmp_path / "a.jpg"])
    assert int((digit > 127).any(dim=1).sum()) == 20
    assert (digit.amax(dim=1) > 200).sum() >= 18


def png_of(width: int, height: int) -> bytes:
    """A PNG whose header states the size, without any pixels."""
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"")),
        (b"IEND", b""),
    ]
    chunks = (struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def saved(path: Path, image: Image.Image, **more: Any) -> bytes:
    image.save(path, **more)
    return path.read_bytes()


@pytest.mark.parametrize("suffix", ["png", "jpg", "gif", "tiff", "webp", "bmp"])
def test_a_truncated_image_is_rejected(tmp_path: Path, digits: torch.Tensor, suffix: str) -> None:
    path = tmp_path / f"half.{suffix}"
    content = saved(path, Image.fromarray(digits[0].numpy()).resize((300, 300)))
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match=r"half\..*damaged"):
        read_digits([path])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"0123456789 this is no image", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
        (png_of(8000, 6251), "50 megapixels"),
        (png_of(10_000, 10_000), "50 megapixels"),
        (png_of(100_000, 100_000), "50 megapixels"),
        (png_of(8000, 6250), "damaged"),
    ],
    ids=["nothing", "text", "program", "large", "larger", "bomb", "just not too large"],
)
def test_other_files_are_rejected(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "own.png"
    path.write_bytes(content)
    with pytest.raises(InputError, match=rf"own\.png: .*{message}"):
        read_digits([path])


def blank(kind: str) -> Array:
    noise = np.random.default_rng(0).normal(0, 15, (90, 120))
    light = np.linspace(-25, 25, 120) + np.linspace(-20, 20, 90)[:, None]
    return {
        "white": np.full((90, 120), 255.0),
        "black": np.zeros((90, 120)),
        "pixel": np.full((1, 1), 7.0),
        "noise": 128 + noise,
        "light": 128 + light,
        "light and noise": 128 + light + noise,
    }[kind]


@pytest.mark.parametrize("kind", ["white", "black", "pixel", "noise", "light", "light and noise"])
@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_an_image_without_ink_is_all_zero(tmp_path: Path, kind: str, suffix: str) -> None:
    path = tmp_path / f"blank.{suffix}"
    Image.fromarray(blank(kind).astype(np.uint8)).save(path)
    assert not read_digits([path]).any()


@pytest.mark.parametrize("opacity", [0, 255])
def test_a_transparent_image_without_ink_is_all_zero(tmp_path: Path, opacity: int) -> None:
    Image.new("RGBA", (60, 80), (255, 255, 255, opacity)).save(tmp_path / "blank.png")
    assert not read_digits([tmp_path / "blank.png"]).any()


def test_one_message_names_all_images_that_cannot_be_read(tmp_path: Path, digits: torch.Tensor) -> None:
    content = saved(tmp_path / "0.png", Image.fromarray(digits[0].numpy()).resize((300, 300)))
    (tmp_path / "1.png").write_bytes(content[: len(content) // 2])
    (tmp_path / "2.jpg").write_bytes(b"")
    (tmp_path / "3.gif").write_bytes(b"0123456789 this is no image")
    (tmp_path / "4.png").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "5.png")
    problems = (
        "1.png: damaged",
        "2.jpg: the file is empty",
        "3.gif: not an image",
        "4.png: no such",
        "5.png: neither",
    )
    for read in (read_digits, lambda files: load_user_images(files, DataSettings(name="shapes"))):
        with pytest.raises(InputError, match=r"^5 of 6 images cannot be read: ") as caught:
            read(find_images([tmp_path]))
        assert all(problem in str(caught.value) for problem in problems), caught.value


def test_values_that_are_not_finite_are_rejected(tmp_path: Path) -> None:
    Image.fromarray(np.array([[0, np.nan], [1, 2]], np.float32)).save(tmp_path / "nan.tiff")
    with pytest.raises(InputError, match=r"nan\.tiff.*not finite"):
        read_digits([tmp_path / "nan.tiff"])


def test_several_pages_are_rejected(tmp_path: Path, large: Array) -> None:
    first, second = Image.fromarray(large), Image.fromarray(255 - large)
    first.save(tmp_path / "pages.tiff", save_all=True, append_images=[second])
    with pytest.raises(InputError, match=r"pages\.tiff: holds several images"):
        read_digits([tmp_path / "pages.tiff"])


def test_a_large_photograph_is_read(tmp_path: Path, digits: torch.Tensor) -> None:
    grey = np.full((3000, 4000), 200, np.uint8)
    grey[2400:2800, 3300:3580] -= np.asarray(Image.fromarray(crop_to_ink(digits[4])).resize((280, 400))) // 2
    Image.fromarray(grey).convert("RGB").save(tmp_path / "a.jpg")
    Image.fromarray(grey).save(tmp_path / "a.png", compress_level=1)
    assert distance(tmp_path / "a.jpg", digits[4]) < 25
    assert distance(tmp_path / "a.jpg", read_digits([tmp_path / "a.png"])[0]) < 6


def test_images_are_found_in_order(tmp_path: Path) -> None:
    for name in ("b.PNG", "a.jpeg", "c/z.webp", "c/d/e.tif", "c/note.txt", ".hidden.png", ".git/f.png", "given.data"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    found = find_images([tmp_path / "given.data", tmp_path, tmp_path / "b.PNG"])
    names = [path.relative_to(tmp_path).as_posix() for path in found]
    assert names == ["given.data", "a.jpeg", "b.PNG", "c/d/e.tif", "c/z.webp", "b.PNG"]


def test_an_empty_list_of_images() -> None:
    assert find_images([]) == []
    assert read_digits([]).shape == (0, 28, 28)


def test_missing_empty_and_odd_paths_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "note.txt").write_text("x")
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "link.png").symlink_to(tmp_path / "gone")
    for name, message in {
        "absent.png": "no such file",
        "folder": "no image in this folder",
        "pipe.png": "neither a file",
        "link.png": "no such file",
    }.items():
        with pytest.raises(InputError, match=f"{name}: {message}"):
            read_digits(find_images([tmp_path / name]))
    with pytest.raises(InputError, match="folder"):
        read_digits([tmp_path / "folder"])


def test_files_without_permission_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The paths are relative, because the user nobody cannot enter the parent folders.
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o755)
    for name in ("file/a.png", "closed/b.png", "open/below/c.png"):
        Path(name).parent.mkdir(parents=True)
        Path(name).write_bytes(b"x")
    for name in ("file/a.png", "closed", "open/below"):
        Path(name).chmod(0)
    with as_nobody():
        for given, culprit in (("file", "file/a.png"), ("file/a.png", "file/a.png"), ("closed", "closed")):
            with pytest.raises(InputError, match=f"^{culprit}: no permission"):
                read_digits(find_images([Path(given)]))
        with pytest.raises(InputError, match=r"^open/below: no permission"):
            find_images([Path("open")])
        with pytest.raises(InputError, match=r"^file/a\.png: no permission"):
            read_digits([Path("file/a.png")])
        with pytest.raises(InputError, match=r"^open/t\.csv: the table cannot be written"):
            write_table(Path("open/t.csv"), [DigitPrediction(1, 0.5)])
    for name in ("closed", "open/below"):
        Path(name).chmod(0o755)
