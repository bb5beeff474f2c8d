"""Dropout without gradients is seen, whatever drops the values, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ddp_doctor.probes.draws import DropoutWatch
from ddp_doctor.records.recorder import Recorder

X = torch.ones(2, 8, 16)
CONTEXTS = pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])


def dropouts(call: Callable[[], object], folder: Path) -> int:
    """Returns how many dropouts were recorded."""
    recorder = Recorder(folder)
    with DropoutWatch(recorder):
        call()
    return len(recorder.events)


@CONTEXTS
@pytest.mark.parametrize(
    "call",
    [
        lambda: F.dropout(X, 0.25),
        lambda: F.dropout1d(X, 0.25),
        lambda: nn.Dropout(0.25)(X),
        lambda: nn.LSTM(16, 4, 2, dropout=0.25)(X),
        lambda: F.scaled_dot_product_attention(X, X, X, dropout_p=0.25),
    ],
    ids=["function", "channels", "module", "lstm", "attention"],
)
def test_active_dropout_is_seen(call: Callable[[], object], context: Callable[[], object], tmp_path: Path) -> None:
    with context():  # type: ignore[attr-defined]
        assert dropouts(call, tmp_path) == 1


@CONTEXTS
@pytest.mark.parametrize(
    "call",
    [
        lambda: F.dropout(X, 0.25, training=False),
        lambda: nn.Dropout(0.25).eval()(X),
        lambda: nn.LSTM(16, 4, 2, dropout=0.25).eval()(X),
        lambda: F.scaled_dot_product_attention(X, X, X),
        lambda: torch.bernoulli(X / 2),
        lambda: X + torch.randn_like(X),
    ],
    ids=["function", "module", "lstm", "attention", "random mask", "noise"],
)
def test_other_random_numbers_are_no_dropout(
    call: Callable[[], object], context: Callable[[], object], tmp_path: Path
) -> None:
    with context():  # type: ignore[attr-defined]
        assert dropouts(call, tmp_path) == 0


def test_dropout_in_training_is_not_recorded(tmp_path: Path) -> None:
    assert dropouts(lambda: F.dropout(X, 0.25), tmp_path) == 0
