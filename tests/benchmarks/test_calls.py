"""The calls of a step: the rows add up to it, and LitTrainer calls less than a stock Trainer."""

from __future__ import annotations

import pytest

from benchmarks import calls


def test_the_rows_add_up_to_the_step() -> None:
    found = {name: calls.calls_of(make, 20, 500.0) for name, make in calls.TRAINERS.items()}
    for of_trainer in found.values():
        assert sum(us for _, us in of_trainer.values()) == pytest.approx(500, rel=0.01)
    number = {name: sum(row[0] for row in of_trainer.values()) for name, of_trainer in found.items()}
    assert number["LitTrainer"] < 0.6 * number["stock"]
    *rows, others, step = calls.table(found).splitlines()[1:]
    assert len(rows) > 10
    assert others.startswith("other files ")
    shown = [[float(cell) for cell in row.split()[-4:]] for row in (*rows, others)]
    assert [float(cell) for cell in step.split()[-4:]] == pytest.approx(
        [sum(column) for column in zip(*shown, strict=True)], abs=2
    )


def test_too_few_steps_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        calls.main(["--steps", "1"])
    assert ended.value.code == 2
    assert "--steps must be at least 2" in capsys.readouterr().err
