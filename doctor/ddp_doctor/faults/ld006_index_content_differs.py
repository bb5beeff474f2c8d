"""LD006: the same index has different content."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.order import contents, leak, training_epochs
from ddp_doctor.evidence.requirements import communicating, map_style, unmet
from ddp_doctor.findings import Finding, cannot_tell, fault, listed
from ddp_doctor.lazy import torch

Rows = list[list[list[float]]]
# Values of one process, and those of the same samples on a rank.
Pairs = Sequence[tuple[list[float], list[float]]]

TITLE = "The same index has different content"
CAUSE = """\
The order of a `set` and `hash()` differ between processes: classes or file lists that are built from them give an index
another meaning on each rank. A mean or a vocabulary that each rank computes from its own part of the data is the same.
"""
WRONG = """\
classes = {name: n for n, name in enumerate(set(names))}    # another order in each process
"""
FIX = """\
Sort before numbering, never store `hash()` of a string, and compute statistics before the data are split:
    classes = {name: n for n, name in enumerate(sorted(set(names)))}
"""
THREADS = ("sktime/pytorch-forecasting#2293", "huggingface/transformers#48162")
# So many samples of each rank show a relation, and so many values of them that occurred before.
_LEAST_SAMPLES, _LEAST_REPEATED = 8, 16
_MOST_FILES = 65
# What the best line leaves, relative to the values, and what the order of a sum changes.
_ROUNDING, _SAME = 1e-5, 1e-3


def check(evidence: Evidence) -> list[Finding]:
    """Compares what direct calls of the data sets gave on each rank, whose sets of strings have different orders."""
    bases = {event["base"]: event for events in training_epochs(evidence.ranks) for event in events[:1]}
    for base, event in bases.items():
        found = contents(evidence.ranks, base)
        if not (found.different or found.permuted) or leak(evidence.ranks):
            continue
        what = f"another label ({listed([*map(str, found.different)])})" if found.different else "other indices"
        message = f"The {event['dataset']} gives the same samples {what} on each rank."
        amount = f"{len(found.different) or found.calls} of {found.calls} samples"
        return [fault(message, event["step"], "", amount, event["place"])]
    own = _own_part(evidence)
    return [own] if own else unmet(evidence, _called)


def _own_part(evidence: Evidence) -> Finding | None:
    """Finds the first value that each rank computes from its own part of the data, such as by its own mean.

    The ranks have parts of the samples of one process. A sample of a part then has either the same values as on one
    process, or values that are a function of these: a line (another mean and scale), or a table (another numbering).
    """
    for event in evidence.single.of_kind("rows") if evidence.single else ():
        alone = event["rows"]
        parts = [one["rows"] for rank in evidence.ranks for one in rank.of_kind("rows") if one["base"] == event["base"]]
        sizes = [len(part) for part in parts]
        if len(parts) < len(evidence.ranks) or min(sizes) < _LEAST_SAMPLES or abs(sum(sizes) - len(alone)) > len(sizes):
            continue
        for mapped in _mappings(sizes):
            found = [
                (leaf, what)
                for numbers, part in zip(mapped, parts, strict=True)
                for leaf, what in _other_values([alone[n] for n in numbers if n < len(alone)], part)
            ]
            if found and all(what for _, what in found):
                leaf, what = found[0]
                message = f"The same sample has other values on a rank: each computes {what} from its part of the data."
                place = next((event["place"] for events in training_epochs(evidence.ranks) for event in events), "")
                return fault(message, 0, f"value {leaf} of {event['dataset']}", place=place)
    return None


def _mappings(sizes: Sequence[int]) -> Iterator[Sequence[Sequence[int]]]:
    """Yields which samples of one process those of each rank may be: every N-th sample or file, or a block."""
    count, size = len(sizes), max(sizes)
    for rows in (rows for rows in range(1, size + 1) if (size % rows == 0 and size // rows < _MOST_FILES) or rows == 1):
        files = range(0, size * count, rows * count)
        yield [[first + rows * rank + row for first in files for row in range(rows)] for rank in range(count)]


def _other_values(alone: Rows, here: Rows) -> Iterator[tuple[int, str]]:
    """Yields the place and the cause of each value that differs; no cause for one that is another sample's."""
    rows = list(zip(alone, here, strict=False))
    for leaf in range(min(min(len(a), len(b)) for a, b in rows)):
        # Padding to another length is no other value.
        pairs = [(a[leaf][: len(b[leaf])], b[leaf][: len(a[leaf])]) for a, b in rows]
        if not all(a for a, _ in pairs) or all(a == b for a, b in pairs):
            continue
        if all(isinstance(value, int) for pair in pairs for side in pair for value in side):
            yield leaf, "a vocabulary or a numbering of classes" if _is_table(pairs) else ""
        elif not _is_same(pairs):
            yield leaf, "a mean and a scale" if _is_line(pairs) else ""


def _is_same(pairs: Pairs) -> bool:
    """Returns whether the values are equal up to rounding."""
    x, y = (torch.tensor([value for pair in pairs for value in pair[side]], dtype=torch.float64) for side in (0, 1))
    return bool((x - y).abs().max() <= _SAME * x.std(correction=0))


def _is_table(pairs: Pairs) -> bool:
    """Returns whether equal numbers on one process are equal on the rank, and different ones are different.

    One number may stand for all words that a vocabulary lacks.
    """
    values = [pair for a, b in pairs for pair in zip(a, b, strict=True)]
    partners = [Counter(pair[side] for pair in set(values)) for side in (0, 1)]
    unknown = {number for counts in partners for number, count in counts.items() if count > 1}
    rest = [pair for pair in values if not unknown & set(pair)]
    known = dict(rest)
    # Most words that a vocabulary has are in that of a rank, too.
    fits = len(unknown) < 2 and len(rest) - len(known) >= _LEAST_REPEATED and 2 * len(rest) >= len(values)
    return fits and len(known) > 1 and any(one != other for one, other in known.items())


def _is_line(pairs: Pairs) -> bool:
    """Returns whether each value is a multiple of that of one process plus a constant, alike in all samples."""
    if len({len(own) for pair in pairs for own in pair}) > 1:
        return False
    x, y = (torch.tensor([pair[side] for pair in pairs], dtype=torch.float64) for side in (0, 1))
    x, y = x - x.mean(0), y - y.mean(0)
    slope = (x * y).sum(0) / (x * x).sum(0).clamp(min=1e-30)
    size = y.abs().max()
    return bool(size) and bool((y - slope * x).abs().max() <= _ROUNDING * size)


def _called(evidence: Evidence) -> Finding | None:
    """A data set was called directly on all ranks."""
    bases = {event["base"] for events in training_epochs(evidence.ranks) for event in events}
    if any(contents(evidence.ranks, base).same is not None for base in bases):
        return None
    return cannot_tell("Direct calls of the data set do not show whether an index means the same sample on each rank.")


NEEDS = (communicating, map_style)
