"""Opens image files that may be damaged or hostile."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from lit_mnist.errors import InputError

MAX_PIXELS = 50_000_000
# The formats of a user's images.
USER_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP")


@contextmanager
def open_image(path: Path, formats: tuple[str, ...]) -> Iterator[Image.Image]:
    """Opens an image of limited size. Errors of the decoder inside the block also name the file.

    Args:
        path: The file.
        formats: Pillow's names of the accepted formats; no other decoder sees the file.

    Yields:
        The image, of which only the header has been read.

    Raises:
        InputError: The file cannot be read or decoded, is empty, or has several images or more than 50 megapixels.
    """
    too_large = f"{path}: more than {MAX_PIXELS // 1_000_000} megapixels; reduce the image first"
    try:
        if path.stat().st_size == 0:
            raise InputError(f"{path}: the file is empty")
        # Given the path, Pillow maps an uncompressed TIFF into memory and swaps the sides of a rotated one.
        with path.open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file, formats=formats) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise InputError(too_large)
                # The JPEG of a camera may contain a second image as a preview.
                if image.format != "MPO" and getattr(image, "is_animated", False):
                    raise InputError(f"{path}: holds several images; give one per file")
                yield image
    except InputError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InputError(too_large) from error
    except UnidentifiedImageError as error:
        raise InputError(f"{path}: not an image in a known format ({', '.join(formats)})") from error
    except Exception as error:  # decoders raise many kinds for a damaged file, SyntaxError among them
        if isinstance(error, OSError) and error.errno:
            raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
        raise InputError(f"{path}: damaged, cannot be decoded ({error})") from error
