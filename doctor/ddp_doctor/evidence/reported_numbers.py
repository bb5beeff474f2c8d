"""The numbers that a rank reports, by their places in the program."""

from __future__ import annotations

from collections import Counter

from ddp_doctor.records.run import RankRecord

# Training epochs that are examined.
_EPOCHS = 2
# Place in the program, how often it has reported before, and position within the report.
Key = tuple[str, int, int]
# Value, rounding, name, place and step.
Number = tuple[float, float, str, str, int]


def numbers_of(record: RankRecord) -> dict[Key, Number]:
    """Returns the reported numbers by place, time and position, apart from those of epochs after the examined ones.

    In those epochs, an evaluation has one batch on each rank, which are more samples on more ranks. A number that is
    reported between the batches of an evaluation shows its progress.
    """
    found, times, progress = {}, Counter[str](), _progress(record)
    late = next((event["step"] for event in record.training_epochs[_EPOCHS : _EPOCHS + 1]), None)
    for event in record.of_kind("reported"):
        if late is not None and event["step"] > late:
            break
        if event["key"] in progress:
            continue
        for position, (value, rounding, word) in enumerate(event["values"]):
            key = event["key"], times[event["key"]], position
            found[key] = (value, rounding, event["name"] or word, event["place"], event["step"])
        times[event["key"]] += 1
    return found


def _progress(record: RankRecord) -> set[str]:
    """Returns the places that report within the loop over the batches of an evaluation."""
    found, since, last = set[str](), set[str](), None
    for event in record.of_kind("batch", "stop", "reported"):
        if event["kind"] == "reported":
            since.add(event["key"])
            continue
        if last == (last := (event["loader"], event["iteration"], event["step"])) and not event["trains"]:
            found |= since
        since.clear()
    return found
