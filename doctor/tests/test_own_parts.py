"""Values that each rank computes from its own part of the data, and what is none: padding, indices, noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.faults.ld006_index_content_differs import Rows, _own_part
from ddp_doctor.launch.runner import Runner
from ddp_doctor.records.run import RankRecord, Run
from ddp_doctor.records.spec import Spec, Target

ALL = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
WORDS = (10 * ALL).int().remainder(7)


def rows(*leaves: torch.Tensor) -> Rows:
    return [[part.tolist() for part in sample] for sample in zip(*leaves, strict=True)]


def evidence(alone: Rows, *parts: Rows) -> Evidence:
    runs: dict[str, Any] = {}
    for name, found in {"single": [alone], "ranks": [*parts]}.items():
        spec = Spec(Target("a:b"), world_size=len(found))
        events = [[{"kind": "rows", "base": 0, "dataset": "Data", "rows": own}] for own in found]
        end = {"kind": "end", "reached_end": True, "step": 1}
        runs[name] = Run(spec, Path(), [RankRecord(rank, [*own, end]) for rank, own in enumerate(events)])
    return Evidence(runs["ranks"].spec, Runner.__new__(Runner), runs)


def scaled(part: torch.Tensor) -> torch.Tensor:
    return (part - part.mean(0)) / part.std(0)


@pytest.mark.parametrize("parts", [[ALL[0::2], ALL[1::2]], [ALL[:20], ALL[20:]]])
def test_a_part_that_is_scaled_by_its_own_mean_is_found(parts: list[torch.Tensor]) -> None:
    assert _own_part(evidence(rows(ALL), *map(rows, parts))) is None
    found = _own_part(evidence(rows(scaled(ALL)), *(rows(scaled(part)) for part in parts)))
    assert found
    own, alone = (", ".join(f"{value:.4g}" for value in scaled(part)[0].tolist()) for part in (parts[0], ALL))
    assert f"begins with {own}, and with {alone} on one process. Each rank computes a mean" in found.message


def test_a_part_that_is_numbered_by_itself_is_found_on_its_rank() -> None:
    other = torch.tensor([3, 1, 0, 2, 4, 6, 5], dtype=torch.int32)[WORDS[1::2]]
    found = _own_part(evidence(rows(WORDS, ALL), rows(WORDS[0::2], ALL[0::2]), rows(other, ALL[1::2])))
    assert found
    assert found.tensor == "value 0 of Data"
    assert "of rank 1 begins" in found.message
    assert "a vocabulary" in found.message


def test_a_part_of_every_second_file_with_a_vocabulary_of_its_own_is_found() -> None:
    files = WORDS.reshape(8, 5, 3)

    def numbered(part: torch.Tensor, numbers: list[int], unknown: int) -> torch.Tensor:
        own = torch.tensor(numbers)
        own[unknown] = 0
        return own[part.reshape(-1, 3)]

    # One word of seven is in no vocabulary.
    whole = numbered(files, [1, 2, 3, 4, 5, 6, 7], 6)
    parts = numbered(files[0::2], [3, 1, 4, 2, 5, 6, 7], 6), numbered(files[1::2], [1, 2, 3, 4, 5, 6, 7], 2)
    found = _own_part(evidence(rows(whole), *map(rows, parts)))
    assert found
    assert "a vocabulary" in found.message
    assert _own_part(evidence(rows(WORDS), *(rows(part.reshape(-1, 3)) for part in (files[0::2], files[1::2])))) is None


@pytest.mark.parametrize(
    "changed",
    [
        # The position in the part.
        torch.arange(20)[:, None],
        # Padded to the longest sample of the part.
        torch.cat([WORDS[1::2], torch.full((20, 2), 9)], 1),
        # Noise of the rank.
        ALL[1::2] + 0.01 * torch.randn(20, 3, generator=torch.Generator().manual_seed(1)),
        # Another order of a sum.
        ALL[1::2] * (1 + 1e-6),
        # Other samples.
        torch.randint(0, 7, (20, 3), generator=torch.Generator().manual_seed(2)),
    ],
)
def test_other_differences_are_no_such_values(changed: torch.Tensor) -> None:
    whole = {1: torch.arange(40)[:, None], 3: ALL if changed.is_floating_point() else WORDS, 5: WORDS}[changed.shape[1]]
    assert _own_part(evidence(rows(whole), rows(whole[0::2]), rows(changed))) is None


def test_parts_of_other_sizes_are_not_compared() -> None:
    assert _own_part(evidence(rows(ALL), rows(scaled(ALL[:20])), rows(scaled(ALL[20:30])))) is None
