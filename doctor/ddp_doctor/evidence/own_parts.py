"""Samples whose values each rank computes from its own part of the data, such as by its own mean or vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.records.run import RankRecord

Rows = list[list[list[float]]]
# So many samples of each rank show a relation, and so many values of them that occurred before.
_LEAST_SAMPLES, _LEAST_REPEATED = 8, 16
_MOST_FILES = 65
# What the best line leaves, relative to the values, and what the order of a sum changes.
_ROUNDING, _SAME = 1e-5, 1e-3


@dataclass(frozen=True)
class OwnPart:
    """A value of a data set that has another meaning on the ranks than on one process.

    Attributes:
        dataset: Name of the data set's class.
        rank: A rank with other values.
        leaf: The position of the value among those of a sample.
        index: A sample of the rank.
        values: The first numbers of this sample on the rank.
        alone: Those of the same sample on one process.
        numbered: Whether these are numbers of classes or words, and not measurements.
    """

    dataset: str
    rank: int
    leaf: int
    index: int
    values: tuple[float, ...]
    alone: tuple[float, ...]
    numbered: bool


def own_part(evidence: Evidence) -> OwnPart | None:
    """Returns the first value that a rank computes otherwise than one process does, or None.

    The ranks have parts of the samples of one process: each every N-th one, a block, or every N-th file. A sample of a
    part then has either the same values as on one process, or values that are a function of these: a line (another mean
    and scale), or a table (another numbering).
    """
    if evidence.single is None:
        return None
    for event in evidence.single.of_kind("rows"):
        parts = [_rows(rank, event["base"]) for rank in evidence.ranks]
        sizes = [len(part) for part in parts]
        if min(sizes, default=0) < _LEAST_SAMPLES or abs(sum(sizes) - len(event["rows"])) > len(sizes):
            continue
        for mapped in _mappings(sizes):
            whole = [[event["rows"][index] for index in own if index < len(event["rows"])] for own in mapped]
            found = list(_other_values(whole, parts))
            if found and None not in found:
                rank, leaf, numbered = next(one for one in found if one)
                row = next(row for row, values in enumerate(parts[rank]) if values[leaf] != whole[rank][row][leaf])
                here, alone = (tuple(rows[rank][row][leaf][:3]) for rows in (parts, whole))
                return OwnPart(event["dataset"], evidence.ranks[rank].rank, leaf, row, here, alone, numbered)
    return None


def _rows(record: RankRecord, base: int) -> Rows:
    return next((event["rows"] for event in record.of_kind("rows") if event["base"] == base), [])


def _mappings(sizes: Sequence[int]) -> Iterator[Sequence[Sequence[int]]]:
    """Yields which samples of one process those of each rank may be: every N-th one, a block, or every N-th file."""
    count, size = len(sizes), sizes[0]
    yield [range(rank, rank + size * count, count) for rank, size in enumerate(sizes)]
    yield [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    for files in range(2, _MOST_FILES if len(set(sizes)) == 1 else 0):
        rows = size // files
        if rows * files == size:
            firsts = [[rows * (count * file + rank) for file in range(files)] for rank in range(count)]
            yield [[first + row for first in own for row in range(rows)] for own in firsts]


def _other_values(whole: Sequence[Rows], parts: Sequence[Rows]) -> Iterator[tuple[int, int, bool] | None]:
    """Yields each value that differs, as (rank, leaf, numbered), and None for one that is not the same sample's."""
    for rank, (alone, here) in enumerate(zip(whole, parts, strict=True)):
        rows = list(zip(alone, here, strict=False))
        for leaf in range(min(min(len(a), len(b)) for a, b in rows)):
            pairs = [(a[leaf], b[leaf]) for a, b in rows]
            # Padding to another length is no other value.
            short = [min(len(a), len(b)) for a, b in pairs]
            pairs = [(a[:size], b[:size]) for (a, b), size in zip(pairs, short, strict=True)]
            numbered = all(isinstance(value, int) for a, b in pairs for value in (*a, *b))
            if all(a == b for a, b in pairs) or not min(short) or (not numbered and _is_same(pairs)):
                continue
            same = _is_table(pairs) if numbered else len(set(short)) == 1 and _is_line(pairs)
            yield (rank, leaf, numbered) if same else None


def _is_same(pairs: Sequence[tuple[list[float], list[float]]]) -> bool:
    """Returns whether the values are equal up to rounding."""
    x, y = (torch.tensor([value for pair in pairs for value in pair[side]], dtype=torch.float64) for side in (0, 1))
    return bool((x - y).abs().max() <= _SAME * x.std(correction=0))


def _is_table(pairs: Sequence[tuple[list[float], list[float]]]) -> bool:
    """Returns whether equal numbers on one process are equal on the rank, and different ones are different.

    One number may stand for all words that a vocabulary lacks.
    """
    values = [pair for a, b in pairs for pair in zip(a, b, strict=True)]
    unknown = {number for side in (0, 1) for number in _ambiguous(values, side)}
    rest = [pair for pair in values if not unknown & set(pair)]
    known = dict(rest)
    # Most words that a vocabulary has are in that of a rank, too.
    fits = len(unknown) < 2 and len(rest) - len(known) >= _LEAST_REPEATED and 2 * len(rest) >= len(values)
    return fits and len(known) > 1 and any(one != other for one, other in known.items())


def _ambiguous(values: Sequence[tuple[float, float]], side: int) -> set[float]:
    """Returns the numbers of a side (0: one process, 1: the rank) to which several of the other side belong."""
    found: dict[float, set[float]] = {}
    for pair in values:
        found.setdefault(pair[side], set()).add(pair[1 - side])
    return {number for number, others in found.items() if len(others) > 1}


def _is_line(pairs: Sequence[tuple[list[float], list[float]]]) -> bool:
    """Returns whether each value is a multiple of that of one process plus a constant, alike in all samples."""
    x, y = (torch.tensor([pair[side] for pair in pairs], dtype=torch.float64) for side in (0, 1))
    if not (x.isfinite().all() and y.isfinite().all()):
        return False
    x, y = x - x.mean(0), y - y.mean(0)
    slope = (x * y).sum(0) / (x * x).sum(0).clamp(min=1e-30)
    size = y.abs().max()
    return bool(size) and bool((y - slope * x).abs().max() <= _ROUNDING * size)
