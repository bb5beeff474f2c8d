"""Opens image files that may be damaged or hostile, and says by name what is wrong with one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from PIL import Image, UnidentifiedImageError

from lit_mnist.errors import InputError

MOST_PIXELS = 50_000_000


@contextmanager
def open_image(path: Path, formats: tuple[str, ...]) -> Iterator[Image.Image]:
    """Opens a image of a size that can be held; what its decoding raises inside the block is refused by name, too.

    Args:
        path: The file.
        formats: Pillow's names of the formats that it may have; no other decoder sees the file.

    Yields:
        The image, of which only the header has been read.

    Raises:
        InputError: The file cannot be read or decoded, is empty, holds several images or more than 50 megapixels.
    """
    too_large = f"{path}: more than {MOST_PIXELS // 1_000_000} megapixels; reduce the image first"
    try:
        if path.stat().st_size == 0:
            raise InputError(f"{path}: the file is empty")
        # Given the path, Pillow maps an uncompressed TIFF into memory with the sides of a turned one exchanged.
        with path.open("rb") as file, _opened(file, formats) as image:
            if image.width * image.height > MOST_PIXELS:
                raise InputError(too_large)
            # A camera's JPEG may carry a second image for its preview.
            if image.format != "MPO" and getattr(image, "is_animated", False):
                raise InputError(f"{path}: holds several images; give one per file")
            yield image
    except InputError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InputError(too_large) from error
    except UnidentifiedImageError as error:
        raise InputError(f"{path}: not a image in a known format ({', '.join(formats)})") from error
    except Exception as error:  # the decoders raise many kinds for a damaged file, SyntaxError among them
        if isinstance(error, OSError) and error.errno:
            raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
        raise InputError(f"{path}: damaged, cannot be decoded ({error})") from error


def _opened(file: IO[bytes], formats: tuple[str, ...]) -> Image.Image:
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        return Image.open(file, formats=formats)
