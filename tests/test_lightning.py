"""What Lightning itself adds to a step is kept small, by its public interfaces as far as they reach."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import Program
from torch import nn

from lit_mnist.module import LitClassifier
from lit_mnist.seams import PlainHookName

HOOK = "_current_fx_name"


def test_lightning_notes_its_hooks_without_a_search_for_parameters(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails, too, where Lightning notes them by another name: then the seam is of no use any more."""
    counts = {"plain": 0, "searched": 0, "others": 0}
    plainly, searching = PlainHookName.__setattr__, nn.Module.__setattr__

    def noted(self: Any, name: str, value: Any) -> None:
        counts["plain"] += name == HOOK
        plainly(self, name, value)

    def searched(self: nn.Module, name: str, value: Any) -> None:
        if isinstance(self, LitClassifier):
            counts["searched" if name == HOOK else "others"] += 1
            (program.folder / "counts.json").write_text(json.dumps(counts))
        searching(self, name, value)

    monkeypatch.setattr(PlainHookName, "__setattr__", noted)
    monkeypatch.setattr(nn.Module, "__setattr__", searched)
    program.train("--max-steps", 50, "--batch-size", 12, "--data.val_size", 0, "--data.test_size", 12, "--lr", 0.01)
    found = json.loads((program.folder / "counts.json").read_text())
    assert found["plain"] > 10 * 50
    assert found["searched"] == 0
    # The loss, the rate and the steps made, of each step.
    assert found["others"] < 5 * 50
