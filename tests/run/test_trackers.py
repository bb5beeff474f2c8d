"""A run ends the run of a tracker that a forked rank would leave open."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from lit_mnist.run.finish import end_tracker


@pytest.mark.parametrize(("run", "ended"), [(object(), 1), (None, 0)])
def test_a_run_of_weights_and_biases_is_ended_once(
    monkeypatch: pytest.MonkeyPatch, run: object | None, ended: int
) -> None:
    calls = []
    tracker = SimpleNamespace(run=run)

    def finish() -> None:
        calls.append("finish")
        tracker.run = None

    tracker.finish = finish
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    end_tracker()
    end_tracker()
    assert len(calls) == ended


def test_a_run_without_a_tracker_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    end_tracker()
