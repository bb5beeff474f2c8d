"""Faults that a script injects into healthy programs are found."""

from __future__ import annotations

import ast

import pytest
from mutations import examine_mutant, is_found, mutants, ordered

# One mutant of each kind; mutations.py examines all of them.
CHOSEN = {
    "set_epoch removed: static_graph_checkpointed",
    "DistributedSampler removed: distillation",
    "rank 0 clips: reports_own_best",
    "loss divided by the ranks: lightning_digits",
    "optimizer without the first parameter: accelerate_samplers",
    "unscale_ removed: torchrun_grad_scaler",
    "schedule steps per process: per_epoch",
    "zero_grad removed: by_hand",
    "reduction of the metric removed: reduced_sums",
    "barrier of rank 0: frozen_teacher",
    "all ranks save: frozen_teacher",
}


def test_each_mutant_is_valid() -> None:
    assert {mutant.name for mutant in mutants()} >= CHOSEN
    for mutant in mutants():
        ast.parse(mutant.case.text)


def test_each_fault_is_examined_in_each_kind_of_program_before_a_second_time() -> None:
    cells = [(mutant.mutation.name, mutant.kind) for mutant in ordered(mutants())]
    assert len(set(cells[: len(set(cells))])) == len(set(cells))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sorted(CHOSEN))
def test_an_injected_fault_is_found(name: str) -> None:
    result = examine_mutant(next(mutant for mutant in mutants() if mutant.name == name))
    assert is_found(result), result
