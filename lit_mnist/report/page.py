"""The report: one HTML file that needs nothing else, neither a script nor a network.

`write_report` is called once, at a run's end, by the rank that writes.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lit_mnist.checkpoint.atomic_io import atomic_file
from lit_mnist.report.confusion import confusion
from lit_mnist.report.curves import curves
from lit_mnist.report.facts import covered, facts
from lit_mnist.report.formats import SPACE, count, duration, number, percent, text
from lit_mnist.report.segmentation import (
    SEGMENTATION_STYLE,
    ShownImage,
    classes_section,
    is_segmentation,
    segmentation_gallery,
    segmentation_headline,
)
from lit_mnist.report.style import STYLE

MOST_MISTAKES = 40
SIDE = 28  # pixels of an image of the MNIST family


@dataclass(frozen=True, eq=False)
class Mistake:
    """A test image that was answered wrongly.

    Args:
        image: The image as stored, uint8 [28, 28].
        index: Its place in the test set, from 0.
        label: Its true class.
        predicted: The answer.
        probability: The probability that the network gave to the wrong answer, from 0 to 1.

    Raises:
        ValueError: The image has another shape or type.
    """

    image: np.ndarray[Any, np.dtype[np.uint8]]
    index: int
    label: int
    predicted: int
    probability: float

    def __post_init__(self) -> None:
        if self.image.shape != (SIDE, SIDE) or self.image.dtype != np.uint8:
            raise ValueError(
                f"A mistake's image must be uint8 [{SIDE}, {SIDE}], but is {self.image.dtype} {list(self.image.shape)}."
            )


def write_report(
    path: Path,
    *,
    result: Mapping[str, Any],
    history: Sequence[Mapping[str, float]],
    mistakes: Sequence[Mistake],
    class_names: Sequence[str],
    segmentation: Sequence[ShownImage] = (),
) -> None:
    """Writes the report of a run; a reader sees the old file or the whole new one, never a part.

    Args:
        path: The file to write; its folder must exist.
        result: The content of `result.json`. What is absent or None is shown as an en dash.
        history: The rows of `metrics.csv` in order; metrics that a row does not have are absent or NaN.
        mistakes: Test images answered wrongly; those with the most probable wrong answers are shown.
        class_names: The name of every class.
        segmentation: Of a segmentation test, the best and the worst.

    Raises:
        ValueError: The result or a mistake does not fit the class names.
        OSError: The file cannot be written.
    """
    write_page(path, render(result, history, mistakes, class_names, segmentation))


def write_page(path: Path, page: str) -> None:
    """Writes a whole page; a reader sees the old file or the new one, never a part.

    Raises:
        OSError: The file cannot be written.
    """
    with atomic_file(path) as file:
        # a file name or argument that is not UTF-8 reaches Python as lone surrogates
        file.write(page.encode("utf-8", "backslashreplace"))


def render(
    result: Mapping[str, Any],
    history: Sequence[Mapping[str, float]],
    mistakes: Sequence[Mistake],
    class_names: Sequence[str],
    segmentation: Sequence[ShownImage] = (),
) -> str:
    """Returns the whole page as HTML; the arguments and errors are those of `write_report`."""
    test = result.get("test") or {}
    name = (result.get("data") or {}).get("name")
    if is_segmentation(result):
        sections = [
            ("Learning", curves(history, result)),
            ("Classes", classes_section(test, class_names)),
            ("Best and worst images", segmentation_gallery(segmentation, class_names)),
            ("The run", facts(result)),
        ]
        title = f"{percent(test.get('mean_iou'))} mean IoU on {text(name)}"
        return frame(title, header(result) + _sections(sections), STYLE + SEGMENTATION_STYLE)
    sections = [
        ("Learning", curves(history, result)),
        ("Confusion", confusion(test, class_names)),
        ("Worst mistakes", gallery(mistakes, errors_of(test), class_names)),
        ("The run", facts(result)),
    ]
    title = f"{percent(test.get('accuracy'), test.get('count'))} on {text(name)}"
    return frame(title, header(result) + _sections(sections))


def _sections(sections: Sequence[tuple[str, str]]) -> str:
    return "".join(f"<section><h2>{title}</h2>{content}</section>" for title, content in sections)


def frame(title: str, content: str, style: str = STYLE) -> str:
    """Returns a whole page around its content, `title` and `content` being HTML."""
    # the policy makes the promise hold in the browser too: no script runs and nothing is loaded
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{title}</title><style>{style}</style></head><body><main>{content}</main></body></html>\n"
    )


def header(result: Mapping[str, Any]) -> str:
    """Returns the headline: the accuracy and the errors, or the mean IoU, and one line of what was run."""
    test, train = result.get("test") or {}, result.get("train") or {}
    data, config = result.get("data") or {}, result.get("config") or {}
    errors, ranks = errors_of(test), result.get("world_size")
    ran = [
        text(result.get("engine")),
        f"{count(ranks)}{SPACE}{'rank' if ranks == 1 else 'ranks'}",
        text(result.get("device")),
        text(result.get("precision")),
        duration(train.get("seconds")),
        f"{number(train.get('images_per_s'))}{SPACE}images/s",
        *filter(None, [covered(result)]),
    ]
    if is_segmentation(result):
        score, what, sentence = segmentation_headline(test)
    else:
        score, what = percent(test.get("accuracy"), test.get("count")), "test accuracy"
        sentence = f"<b>{count(errors)}</b> wrong of <b>{count(test.get('count'))}</b> test images"
    figure, _, unit = score.partition(SPACE)
    return (
        f"<header><p class=over>{text(data.get('name'))} · {text((config.get('model') or {}).get('net'))}</p>"
        f"<h1>{figure}{f'<small>{SPACE}{unit}</small>' if unit else ''} <span>{what}</span></h1>"
        f"<p class=wrongs>{sentence}</p>{one_line(ran)}"
        "</header>"
    )


def one_line(parts: Sequence[str]) -> str:
    """Returns what was run as one line of parts (HTML), none of which is broken where it fits on a line."""
    spans = [f"<span>{part}{'<i> ·</i>' if n < len(parts) else ''}</span>" for n, part in enumerate(parts, start=1)]
    return f"<p class=ran>{' '.join(spans)}</p>"


def errors_of(test: Mapping[str, Any]) -> int | None:
    """Returns the number of wrong answers, counted in the confusion matrix; None without one."""
    matrix = test.get("confusion")
    return None if matrix is None else int(sum(map(sum, matrix)) - sum(row[n] for n, row in enumerate(matrix)))


def gallery(mistakes: Sequence[Mistake], errors: int | None, class_names: Sequence[str]) -> str:
    """Returns the images of the mistakes, the most probable wrong answer first.

    Raises:
        ValueError: A mistake's class has no name.
    """
    if not mistakes:
        none = "Every test image was answered correctly." if errors == 0 else "No images were recorded."
        return f"<p class=quiet>{none}</p>"
    classes = range(len(class_names))
    for mistake in mistakes:
        if mistake.label not in classes or mistake.predicted not in classes:
            raise ValueError(
                f"Test image {mistake.index} is of class {mistake.label}, answered as {mistake.predicted}, "
                f"but there are {len(class_names)} class names."
            )
    shown = sorted(mistakes, key=lambda mistake: (-mistake.probability, mistake.index))[:MOST_MISTAKES]
    total = "" if errors is None else f" of {count(errors)}"
    figures = "".join(map(image, shown, [class_names] * len(shown)))
    return (
        f"<p class=quiet>{len(shown)}{total}, the surest wrong answers first: true → predicted, "
        f"the probability of the wrong answer, and the image's index in the test set.</p>"
        f"<div class=gallery>{figures}</div>"
    )


def image(mistake: Mistake, class_names: Sequence[str]) -> str:
    """Returns one mistake: the image as an embedded PNG and what was made of it."""
    buffer = io.BytesIO()
    # dark on light, as on paper and as `predict` draws them
    Image.fromarray(255 - mistake.image).save(buffer, format="PNG", optimize=True)
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    true, predicted = text(class_names[mistake.label]), text(class_names[mistake.predicted])
    return (
        f'<figure class=mistake><img width={SIDE} height={SIDE} alt="test image {mistake.index}: '
        f'{true}, read as {predicted}" src="data:image/png;base64,{data}"><figcaption>'
        f"<b>{true}<i> → </i><em>{predicted}</em></b> <span>{percent(mistake.probability)}</span> "
        f"<span class=quiet>#{mistake.index}</span></figcaption></figure>"
    )
