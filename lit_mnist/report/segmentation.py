"""The report's parts for scenes: each class's intersection over union, and the best and worst scenes as images."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from lit_mnist.data.segmentation.palette import PALETTE, tinted
from lit_mnist.report.confusion import MOST_LARGE_CELLS, confusion_table, most_frequent
from lit_mnist.report.formats import SPACE, count, percent, text

# Pixels of a image's longer side on the page.
_MOST_SIDE = 320
_JPEG_QUALITY = 85

SEGMENTATION_STYLE = """
.scenes{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,19rem),1fr));gap:1.6rem;margin:1rem 0 2rem}
.scene{break-inside:avoid;min-width:0}
.scene>div{display:grid;grid-template-columns:repeat(3,1fr);gap:3px}
.scene img{display:block;width:100%;height:auto;border-radius:3px}
.scene figcaption{margin-top:.4rem;font-size:.8125rem;overflow-wrap:anywhere}
.colours{display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;font-size:.875rem;color:var(--soft);margin-bottom:1.5rem}
.colours i{display:inline-block;width:.8rem;height:.8rem;border-radius:2px;margin-right:.4rem;vertical-align:-.08em;
box-shadow:0 0 0 1px var(--hair)}
"""


@dataclass(frozen=True, eq=False)
class ShownImage:
    """A scene of the test set and what was predicted for it.

    Args:
        image: Red, green and blue, uint8 [height, width, 3].
        truth: The true classes, uint8 [height, width], 255 where a pixel has none.
        predicted: The predicted classes, uint8 [height, width].
        name: The scene's name.
        index: Its place in the test set, from 0.
        score: Its own mean IoU, from 0 to 1.
    """

    image: npt.NDArray[np.uint8]
    truth: npt.NDArray[np.uint8]
    predicted: npt.NDArray[np.uint8]
    name: str
    index: int
    score: float


def is_segmentation(result: Mapping[str, Any]) -> bool:
    """Returns whether a run was evaluated on scenes."""
    return any("mean_iou" in (result.get(part) or {}) for part in ("test", "validation"))


def segmentation_headline(test: Mapping[str, Any]) -> tuple[str, str, str]:
    """Returns what the page's head says (HTML): the mean IoU, what that is, and one sentence."""
    right = (
        f"<b>{percent(test.get('accuracy'))}</b> of the pixels right, in <b>{count(test.get('count'))}</b> test scenes"
    )
    return percent(test.get("mean_iou")), "test mean IoU", right


def classes_section(test: Mapping[str, Any], class_names: Sequence[str]) -> str:
    """Returns the section of the confusion matrix, in percent of each class's pixels, and of each class's IoU.

    Args:
        test: The result's `test`; read are `confusion`, in pixels, and `iou`.
        class_names: The name of every class.

    Raises:
        ValueError: The matrix does not fit the class names.
    """
    matrix, shares = test.get("confusion"), test.get("iou")
    if matrix is None or shares is None:
        return "<p class=quiet>No confusion matrix was recorded.</p>"
    classes = len(class_names)
    if {len(matrix), len(shares), *map(len, matrix)} != {classes}:
        raise ValueError(f"The confusion matrix is not {classes} x {classes}, as the {classes} class names ask for.")
    sums = [sum(row) for row in matrix]
    parts = [[round(100 * value / (total or 1)) for value in row] for row, total in zip(matrix, sums, strict=True)]
    caption = "Rows: the true class. Columns: the predicted one. In percent of the true class's pixels."
    table = confusion_table(parts, class_names, caption, f"{SPACE}%") + most_frequent(parts, class_names, f"{SPACE}%")
    kind = "large" if classes <= MOST_LARGE_CELLS else "small"
    return f'<div class="confusion {kind}"><div>{table}</div>{_class_list(shares, sums, class_names)}</div>'


def _class_list(shares: Sequence[float | None], pixels: Sequence[int], class_names: Sequence[str]) -> str:
    known = [share if share is not None and math.isfinite(share) else 0.0 for share in shares]
    items = [
        f"<li><span class=who>{text(name)}</span><b>{percent(share)}</b>"
        f'<span class="bar good"><i style="width:{100 * part:.1f}%"></i></span>'
        f"<span class=quiet>{percent(own / (sum(pixels) or 1))}</span></li>"
        for name, share, part, own in zip(class_names, shares, known, pixels, strict=True)
    ]
    return (
        "<div class=classes><h3>Each class</h3><p class=quiet>Intersection over union; in grey the class's share of "
        f'all pixels.</p><ul style="--longest:{max(map(len, class_names))}ch">{"".join(items)}</ul></div>'
    )


def segmentation_gallery(scenes: Sequence[ShownImage], class_names: Sequence[str]) -> str:
    """Returns the best and worst scenes: each as it is, with its true classes, and with the predicted ones."""
    if not scenes:
        return "<p class=quiet>No scenes were recorded.</p>"
    ordered = sorted(scenes, key=lambda scene: (-scene.score, scene.index))
    half = (len(ordered) + 1) // 2
    seen = sorted(
        {int(number) for scene in scenes for mask in (scene.truth, scene.predicted) for number in np.unique(mask)}
    )
    colours = "".join(
        f'<span><i style="background:rgb({",".join(map(str, PALETTE[number]))})"></i>{text(class_names[number])}</span>'
        for number in seen
        if 0 < number < len(class_names)
    )
    groups = [("Best", ordered[:half]), ("Worst", ordered[half:][::-1])]
    return (
        "<p class=quiet>Each scene as the network saw it, with its true classes, and with the predicted ones; then its "
        f"own mean IoU.</p><p class=colours>{colours}</p>"
        + "".join(
            f"<h3>{title}</h3><div class=scenes>{''.join(map(_figure, group))}</div>"
            for title, group in groups
            if group
        )
    )


def _figure(scene: ShownImage) -> str:
    kinds = {
        "as it is": scene.image,
        "true classes": tinted(scene.image, scene.truth),
        "predicted classes": tinted(scene.image, scene.predicted),
    }
    images = "".join(
        f'<img alt="scene {text(scene.name)}, {kind}" src="data:image/jpeg;base64,{_embedded(pixels)}">'
        for kind, pixels in kinds.items()
    )
    return (
        f"<figure class=scene><div>{images}</div><figcaption><b>{percent(scene.score)}</b> "
        f"<span class=quiet>{text(scene.name)} · #{scene.index}</span></figcaption></figure>"
    )


def _embedded(pixels: npt.NDArray[np.uint8]) -> str:
    image = Image.fromarray(pixels)
    image.thumbnail((_MOST_SIDE, _MOST_SIDE))
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=_JPEG_QUALITY)
    return base64.b64encode(buffer.getvalue()).decode("ascii")
