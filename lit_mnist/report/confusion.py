"""The confusion matrix as a coloured table, and the errors of every class."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lit_mnist.report.formats import MISSING, count, percent, text

MOST_LARGE_CELLS = 12  # classes up to which the table fits beside the list of classes
MOST_PAIRS = 5

Matrix = Sequence[Sequence[int]]


def confusion(test: Mapping[str, Any], class_names: Sequence[str]) -> str:
    """Returns the section of the confusion matrix and the classes.

    Args:
        test: The result's `test`; read are `confusion` (rows the true classes, columns the predicted ones) and
            `per_class` (the accuracy of each class), each may be absent.
        class_names: The name of every class, in the matrix's order.

    Returns:
        HTML; a sentence takes the place of a part that was not recorded.

    Raises:
        ValueError: The matrix or the accuracies do not fit the class names.
    """
    matrix: Matrix | None = test.get("confusion")
    shares: Sequence[float | None] | None = test.get("per_class")
    classes = len(class_names)
    if matrix is not None and {len(matrix), *map(len, matrix)} != {classes}:
        raise ValueError(f"The confusion matrix is not {classes} x {classes}, as the {classes} class names ask for.")
    if shares is not None and len(shares) != classes:
        raise ValueError(f"There are {len(shares)} accuracies of classes, but {classes} class names.")
    if matrix is None and shares is None:
        return "<p class=quiet>No confusion matrix was recorded.</p>"
    table = "<p class=quiet>No confusion matrix was recorded.</p>"
    if matrix is not None:
        table = confusion_table(matrix, class_names) + most_frequent(matrix, class_names)
    kind = "large" if classes <= MOST_LARGE_CELLS else "small"
    return f'<div class="confusion {kind}"><div>{table}</div>{class_list(matrix, shares, class_names)}</div>'


def confusion_table(
    matrix: Matrix,
    class_names: Sequence[str],
    caption: str = "Rows: the true class. Columns: the predicted one.",
    unit: str = "",
) -> str:
    """Returns the counts, shaded on two scales: right answers by the most right ones, errors by the most errors.

    Args:
        matrix: The counts, or other whole numbers; rows the true and columns the predicted class.
        class_names: The name of every class.
        caption: What stands above.
        unit: What follows a number in the text.
    """
    classes = range(len(matrix))
    most_right = max(matrix[n][n] for n in classes)
    most_wrong = max((matrix[n][m] for n in classes for m in classes if n != m), default=0)
    turned = " class=turned" if max(map(len, class_names)) > 2 else ""
    head = "".join(f"<th scope=col{turned}><span>{text(name)}</span></th>" for name in class_names)
    rows = []
    for n in classes:
        cells = []
        for m in classes:
            value, most, style = (matrix[n][m], *((most_right, "right") if n == m else (most_wrong, "wrong")))
            if not value:
                cells.append("<td class=none>0</td>")
                continue
            # the root keeps a single error visible beside a frequent one
            shade = value / most if n == m else math.sqrt(value / most)
            title = f"{class_names[n]} read as {class_names[m]}: {count(value)}{unit}"
            cells.append(f'<td class={style} style="--shade:{shade:.2f}" title="{text(title)}">{value:.0f}</td>')
        rows.append(f"<tr><th scope=row>{text(class_names[n])}</th>{''.join(cells)}</tr>")
    return (
        "<div class=scroll tabindex=0 role=region aria-label='Confusion matrix'><table class=matrix>"
        f"<caption>{caption}</caption><thead><tr><td></td>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        f"<p class=scale><span class=right><i></i>right, up to {count(most_right)}{unit}</span> "
        f"<span class=wrong><i></i>wrong, up to {count(most_wrong)}{unit}</span></p>"
    )


def most_frequent(matrix: Matrix, class_names: Sequence[str], unit: str = "") -> str:
    """Returns the most frequent errors in words, empty where there is none."""
    pairs = [(value, n, m) for n, row in enumerate(matrix) for m, value in enumerate(row) if n != m and value > 0]
    pairs.sort(key=lambda pair: (-pair[0], pair[1:]))
    words = [
        f"<b>{text(class_names[n])}</b> read as <b>{text(class_names[m])}</b> ({count(value)}{unit})"
        for value, n, m in pairs[:MOST_PAIRS]
    ]
    return f"<p class=pairs>Most often: {', '.join(words)}.</p>" if words else ""


def class_errors(n: int, matrix: Matrix | None, recorded: float | None) -> tuple[float | None, int | None, str]:
    """Returns the share of class `n` that was answered wrongly, its number of samples, and the same share in counts.

    It is counted in the matrix, or follows from the recorded accuracy where there is none; a class without samples has
    none.
    """
    if matrix is None:
        return (None if recorded is None else 1 - recorded), None, MISSING
    wrong, total = sum(matrix[n]) - matrix[n][n], sum(matrix[n])
    return (wrong / total if total else None), total, f"{count(wrong)} of {count(total)}"


def class_list(matrix: Matrix | None, shares: Sequence[float | None] | None, class_names: Sequence[str]) -> str:
    """Returns every class with the share of its samples answered wrongly, and a bar for that, the worst one's full."""
    rows = [class_errors(n, matrix, shares[n] if shares is not None else None) for n in range(len(class_names))]
    worst = max((share for share, _, _ in rows if share is not None and math.isfinite(share)), default=0.0) or 1.0
    items = []
    for name, (share, total, counts) in zip(class_names, rows, strict=True):
        width = 100 * share / worst if share is not None and math.isfinite(share) else 0.0
        items.append(
            f"<li><span class=who>{text(name)}</span><b>{percent(share, total)}</b>"
            f'<span class=bar><i style="width:{width:.1f}%"></i></span><span class=quiet>{counts}</span></li>'
        )
    return (
        "<div class=classes><h3>Each class</h3><p class=quiet>How many of its images were answered wrongly.</p>"
        f'<ul style="--longest:{max(map(len, class_names))}ch">{"".join(items)}</ul></div>'
    )
