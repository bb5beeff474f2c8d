"""Own images: a digit is read as MNIST would show it, however it was photographed, or refused by name."""

from __future__ import annotations

import csv
import gzip
import os
import struct
import subprocess
import sys
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from conftest import as_nobody
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont
from torch import nn

import lit_mnist
from lit_mnist.data.digits.split import Split
from lit_mnist.errors import InputError
from lit_mnist.experiment import DataSettings
from lit_mnist.predict.grid import draw_grid
from lit_mnist.predict.segmentation import load_user_images
from lit_mnist.predict.table import DigitPrediction, format_predictions, write_table
from lit_mnist.predict.uncertainty import NO_INK, note_uncertainty
from lit_mnist.predict.user_images import find_images, read_digits

Array = npt.NDArray[Any]
DATA = Path(lit_mnist.__file__).parent / "data" / "digits" / "files"


def raw(name: str, offset: int) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(gzip.decompress((DATA / name).read_bytes()), np.uint8, offset=offset).copy())


@pytest.fixture(scope="session")
def digits() -> torch.Tensor:
    return raw("t10k-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28)


Predict = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="session")
def predict() -> Predict:
    """Returns a function from images to their classes and the classes' probabilities."""
    images, labels = raw("train-images-idx3-ubyte.gz", 16).reshape(-1, 1, 28, 28), raw("train-labels-idx1-ubyte.gz", 8)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for inner, outer in ((1, 16), (16, 32)):
            layers += [nn.Conv2d(inner, outer, 5, padding=2), nn.MaxPool2d(2), nn.BatchNorm2d(outer), nn.ReLU()]
        net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 7 * 7, 10))
        order = torch.randperm(len(images))[: 300 * 50].reshape(300, 50)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=len(order))
    for batch in order:
        optimizer.zero_grad()
        F.cross_entropy(net(images[batch] / 255), labels[batch].long()).backward()
        optimizer.step()
        schedule.step()
    net.eval()

    def classes(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.inference_mode():
            probability, predicted = net(images[:, None] / 255).softmax(dim=1).max(dim=1)
        return predicted, probability

    return classes


def cut_out(digit: torch.Tensor) -> Array:
    ink = digit.numpy()
    rows, columns = np.flatnonzero(ink.any(1)), np.flatnonzero(ink.any(0))
    return ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def photograph(shape: Array, random: np.random.Generator, path: Path, *, light: bool) -> None:
    """A JPEG or PNG of random size: random place, size, ink and paper, light from one side, noise."""
    width, height = random.integers(28, 401, 2)
    shape = cut_out(torch.from_numpy(shape))
    longest = max(16, random.uniform(0.15, 1) * min(width, height))
    rows, columns = (max(1, round(length * longest / max(shape.shape))) for length in shape.shape)
    ink = np.asarray(Image.fromarray(shape).resize((columns, rows), Image.Resampling.BICUBIC)) / 255
    page = np.zeros((height, width))
    top, left = random.integers(0, height - rows + 1), random.integers(0, width - columns + 1)
    page[top : top + rows, left : left + columns] = ink
    dark = random.integers(0, 256 - 80)
    bright = random.integers(dark + 80, 256)
    grey = np.where(light, dark + (bright - dark) * page, bright - (bright - dark) * page)
    slope = random.uniform(-15, 15, 2)
    grey += slope[0] * np.linspace(-1, 1, width) + slope[1] * np.linspace(-1, 1, height)[:, None]
    grey += random.uniform(0, 6) * random.standard_normal(grey.shape, np.float32)
    Image.fromarray(grey.clip(0, 255).astype(np.uint8)).save(path, quality=int(random.integers(60, 96)))


@pytest.fixture(scope="session")
def photographs(tmp_path_factory: pytest.TempPathFactory, digits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns 1,000 test digits, and what is read of photographs of them."""
    random, folder = np.random.default_rng(20), tmp_path_factory.mktemp("photographs")
    chosen = digits[torch.from_numpy(random.permutation(len(digits))[:1000])]
    paths = [folder / f"{index}.jpg" for index in range(1000)]
    for index, (digit, path) in enumerate(zip(chosen, paths, strict=True)):
        photograph(digit.numpy(), random, path, light=index % 2 == 0)
    return chosen, read_digits(paths)


def test_photographs_are_classified_like_their_originals(
    photographs: tuple[torch.Tensor, torch.Tensor], predict: Predict
) -> None:
    chosen, read = photographs
    same = predict(read)[0] == predict(chosen)[0]
    assert same[::2].float().mean() >= 0.985, f"light on dark: {same[::2].float().mean():.3f}"
    assert same[1::2].float().mean() >= 0.985, f"dark on light: {same[1::2].float().mean():.3f}"


@pytest.fixture(scope="session")
def training() -> Split:
    images, labels = raw("train-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28), raw("train-labels-idx1-ubyte.gz", 8)
    return Split(images, labels.long())


def glyph(letter: str, font: str) -> Array:
    """A printed letter, light on black, uint8, cut out."""
    page = Image.new("L", (300, 300))
    face = ImageFont.truetype(Path(matplotlib.get_data_path(), "fonts", "ttf", f"{font}.ttf"), 100)
    ImageDraw.Draw(page).text((100, 100), letter, fill=255, font=face)
    return cut_out(torch.from_numpy(np.array(page)))


def side_by_side(left: torch.Tensor, right: torch.Tensor, gap: int) -> Array:
    """Two digits on one line, light on black, uint8, cut out; they overlap where the gap is negative."""
    first, second = cut_out(left), cut_out(right)
    line = np.zeros((28, first.shape[1] + gap + second.shape[1]), np.uint8)
    line[: len(first), : first.shape[1]] = first
    part = line[: len(second), first.shape[1] + gap :]
    part[:] = np.maximum(part, second)
    return cut_out(torch.from_numpy(line))


FONTS = ("DejaVuSans", "DejaVuSerif-Italic", "STIXGeneral", "cmtt10")
UNLIKE_DIGITS = "ACEFHKLMNPRUVWXYcfhkmnruvwx"


def test_what_is_no_digit_is_marked_and_digits_are_not(
    tmp_path: Path,
    digits: torch.Tensor,
    photographs: tuple[torch.Tensor, torch.Tensor],
    predict: Predict,
    training: Split,
) -> None:
    """The shares that the rule marks; docs/run-folder.md has those of the whole test set and the default network."""
    random = np.random.default_rng(3)

    def marked(read: torch.Tensor) -> float:
        notes = note_uncertainty(read, *predict(read), training)
        assert [note == NO_INK for note in notes] == (read.flatten(1).amax(dim=1) == 0).tolist()
        return sum(map(bool, notes)) / len(notes)

    def drawn(name: str, shapes: list[Array]) -> torch.Tensor:
        paths = [tmp_path / f"{name}-{index}.png" for index in range(len(shapes))]
        for index, (shape, path) in enumerate(zip(shapes, paths, strict=True)):
            photograph(shape, random, path, light=index % 2 == 0)
        return read_digits(paths)

    pairs = digits[torch.from_numpy(random.permutation(len(digits))[:200])].unflatten(0, (100, 2))
    apart = [side_by_side(first, second, 2 + index % 5) for index, (first, second) in enumerate(pairs)]
    touching = [side_by_side(first, second, -(index % 3)) for index, (first, second) in enumerate(pairs)]
    letters = [glyph(letter, font) for letter in UNLIKE_DIGITS for font in FONTS]
    noise = [random.uniform(0, 255, random.integers(28, 200, 2)).astype(np.uint8) for _ in range(50)]
    for index, grey in enumerate(noise):
        Image.fromarray(grey).save(tmp_path / f"noise-{index}.png")
    assert marked(photographs[1]) <= 0.04
    assert marked(drawn("apart", apart)) >= 0.95
    assert marked(drawn("touching", touching)) >= 0.8
    assert marked(drawn("letter", letters)) >= 0.75
    assert marked(read_digits([tmp_path / f"noise-{index}.png" for index in range(50)])) == 1


def test_mnist_digits_come_back_as_they_were(tmp_path: Path, digits: torch.Tensor) -> None:
    for index, digit in enumerate(digits[:200].numpy()):
        Image.fromarray(digit if index % 2 else 255 - digit).save(tmp_path / f"{index:03}.png")
    distance = (read_digits(find_images([tmp_path])).int() - digits[:200]).abs().amax(dim=(1, 2))
    # The palest pixels count as paper, and where that moves the centre of mass, the whole digit moves by a pixel.
    assert (distance < 60).float().mean() > 0.95


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
def test_the_ink_fills_the_box_keeps_its_aspect_and_is_centred(
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
    """Black ink with its own opacity; which colour lies under full transparency must not matter."""
    colour = np.where(ink > 0, 0, hidden).astype(np.uint8)
    return Image.fromarray(np.stack([colour, colour, colour, ink], axis=2))


def palette(ink: Array, colours: list[int], **more: object) -> Image.Image:
    """Two colours, the second one for ink; the numbers say nothing about the brightness."""
    image = Image.frombytes("P", ink.shape[::-1], (ink > 127).astype(np.uint8).tobytes())
    image.putpalette(colours)
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
    """The ink of a 7 on a page of 160 x 120, uint8; no turned or mirrored 7 looks like it."""
    ink = Image.fromarray(cut_out(digits[34])).resize((56, 80), Image.Resampling.BICUBIC)
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
    assert distance(path, expected) < 6
    assert distance(path, expected.flip(0)) > 20


TURNS: dict[int, Callable[[Array], Array]] = {
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
@pytest.mark.parametrize("orientation", TURNS)
def test_a_turned_camera_is_undone(
    tmp_path: Path, large: Array, expected: torch.Tensor, orientation: int, suffix: str
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(np.ascontiguousarray(TURNS[orientation](255 - large))).save(path, exif=exif, quality=90)
    assert distance(path, expected) < 6


def test_specks_and_uneven_light_are_left_out(tmp_path: Path, large: Array, expected: torch.Tensor) -> None:
    grey = 190.0 - 0.5 * large
    grey[5:8, 5:8] = grey[115:117, 150:153] = 60
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
    """The head of a PNG that says how large the image is, and nothing of the image."""
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
def test_a_truncated_image_is_refused(tmp_path: Path, digits: torch.Tensor, suffix: str) -> None:
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
def test_what_is_no_image_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
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


def test_values_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    Image.fromarray(np.array([[0, np.nan], [1, 2]], np.float32)).save(tmp_path / "nan.tiff")
    with pytest.raises(InputError, match=r"nan\.tiff.*not finite"):
        read_digits([tmp_path / "nan.tiff"])


def test_several_pages_are_refused(tmp_path: Path, large: Array) -> None:
    first, second = Image.fromarray(large), Image.fromarray(255 - large)
    first.save(tmp_path / "pages.tiff", save_all=True, append_images=[second])
    with pytest.raises(InputError, match=r"pages\.tiff: holds several images"):
        read_digits([tmp_path / "pages.tiff"])


def test_a_large_photograph_is_read(tmp_path: Path, digits: torch.Tensor) -> None:
    grey = np.full((3000, 4000), 200, np.uint8)
    grey[2400:2800, 3300:3580] -= np.asarray(Image.fromarray(cut_out(digits[4])).resize((280, 400))) // 2
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


def test_no_images_are_no_digits() -> None:
    assert find_images([]) == []
    assert read_digits([]).shape == (0, 28, 28)


def test_missing_empty_and_odd_paths_are_refused(tmp_path: Path) -> None:
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


def test_what_may_not_be_read_or_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Names from here on are relative, since the folders above are closed to nobody.
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


def test_the_table_of_a_labelled_set(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("older")
    write_table(path, [DigitPrediction(7, 1.0, 7), DigitPrediction(2, 0.1234567, 3), DigitPrediction(1, 0.5, 1)])
    assert path.read_bytes() == b"index,label,predicted,probability\n0,7,7,1.000000\n1,3,2,0.123457\n2,1,1,0.500000\n"
    assert list(tmp_path.iterdir()) == [path]


def test_the_table_of_own_images(tmp_path: Path) -> None:
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


def test_a_line_tells_the_answer_of_each_of_a_few_images() -> None:
    files = [Path("one.png"), Path("my/two\n.png"), Path(os.fsdecode(b"\x1b[31mcaf\xe9.png")), Path("four.png")]
    notes = ["", "uncertain: unlike the training images", NO_INK, ""]
    names = ["T-shirt", "Sandal"]
    predictions = zip((0, 1, 1, 1), (0.99994, 0.5, 0.9, 1.0), files, notes, strict=True)
    predictions = [DigitPrediction(predicted, share, None, file, note) for predicted, share, file, note in predictions]
    assert format_predictions(predictions, names) == [
        "one.png -> T-shirt (99.99 %)",
        "my/two\\n.png -> Sandal (50.00 %), uncertain: unlike the training images",
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
    """Counts them in a grid of one row, per image."""
    with Image.open(path) as image:
        colours = np.asarray(image.convert("RGB")).astype(int)
    red = (colours[..., 0] > 150) & (colours[..., 1] < 100) & (colours[..., 2] < 100)
    counts: Array = red.sum(axis=0)
    return counts


def test_the_grid_marks_the_wrong_ones(tmp_path: Path, digits: torch.Tensor) -> None:
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
    draw_grid(path, digits[:12], [answer._replace(label=None) for answer in wrong], DIGITS, limit=8)
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


def test_the_grid_shows_the_files_names_and_what_is_uncertain(
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
