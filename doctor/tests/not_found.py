"""Why mutants are not found: which are equivalent, which are reported under another code, and which the doctor misses.

A mutant that is not found and is not here is listed as not explained.
"""

from __future__ import annotations

from collections.abc import Mapping

# Mutants of which nothing that can be measured changes, by the reason. They are not counted.
EQUIVALENT: Mapping[str, tuple[str, ...]] = {
    "The model has no dropout and no batch norm, so that both modes compute the same. A note of LD021 says so.": (
        "train() removed: accelerate_samplers",
        "train() removed: reduced_sums",
        "train() removed: reports_its_times",
    ),
    "The schedule counts the steps of one process, so each sample has the learning rate that it has there. LD017 has a "
    "note.": ("schedule steps per process: two_optimizers", "schedule steps per process: accelerate_samplers"),
    "Fabric calls `set_epoch` itself.": ("set_epoch removed: fabric_loop",),
    "The metric is printed nowhere, and nothing that is trained or saved depends on it.": (
        "reduction of the metric removed: reports_own_best",
    ),
}

# Mutants that another code describes as well, by that code and the reason.
OTHER_CODE: Mapping[tuple[str, str], tuple[str, ...]] = {}

# What the doctor misses, by the reason.
MISSED: Mapping[str, tuple[str, ...]] = {
    "A library creates the group. It may destroy it after the last record, so the check says nothing.": (
        "group not destroyed: hf_trainer_evaluates",
        "group not destroyed: fabric_loop",
    ),
    "The run fails at the unmatched barrier, but the report wrongly calls this a defect of the doctor, because the "
    "program ends without it. A timeout of 120 seconds changes nothing.": (
        "barrier of rank 0: lock_and_file_per_rank",
    ),
}
