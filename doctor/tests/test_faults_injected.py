"""Faults that a script injects into healthy programs are found."""

from __future__ import annotations

import ast

import pytest
from mutations import examine_mutant, is_found, mutants, ordered, reached_from

# One mutant of each kind in make soak; mutations.py examines all of them.
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


def test_only_code_that_a_program_reaches_is_changed() -> None:
    tree = ast.parse("def a():\n    b()\ndef b():\n    pass\ndef c():\n    a()\n")
    assert reached_from(tree, "a") == {"a", "b"}


@pytest.mark.slow
def test_each_mutant_differs_and_is_valid() -> None:
    found = {mutant.name: mutant for mutant in mutants()}
    assert found.keys() >= CHOSEN
    for mutant in (found[name] for name in CHOSEN):
        assert mutant.source != ast.unparse(ast.parse(mutant.case.path.read_text())), mutant.name


@pytest.mark.slow
def test_each_fault_is_examined_in_each_kind_of_program_before_a_second_time() -> None:
    cells = [(mutant.mutation.name, mutant.kind) for mutant in ordered(mutants())]
    assert len(set(cells[: len(set(cells))])) == len(set(cells))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sorted(CHOSEN))
def test_an_injected_fault_is_found(name: str) -> None:
    result = examine_mutant(next(mutant for mutant in mutants() if mutant.name == name))
    assert is_found(result), result
