"""What the probes record of real calls of torch and of the standard library, and what they leave out."""

from __future__ import annotations

import argparse
import builtins
import csv
import io
import json
import logging
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recorded import SPEC
from torch import nn

from ddp_doctor.probes.draws import DrawFlow, RandomReplay
from ddp_doctor.probes.loaders import LoaderProbe
from ddp_doctor.probes.options import OPTIONS, watch_options
from ddp_doctor.probes.reports import ReportProbe
from ddp_doctor.probes.written_files import is_cached
from ddp_doctor.records.recorder import Recorder

X = torch.ones(2, 8, 16)


@pytest.mark.parametrize(
    ("call", "seen"),
    [
        (lambda: F.dropout1d(X, 0.25), 1),
        (lambda: nn.LSTM(16, 4, 2, dropout=0.25)(X), 1),
        (lambda: F.scaled_dot_product_attention(X, X, X, dropout_p=0.25), 1),
        (lambda: nn.LSTM(16, 4, 2, dropout=0.25).eval()(X), 0),
        (lambda: F.scaled_dot_product_attention(X, X, X), 0),
        (lambda: X + torch.randn_like(X), 0),
    ],
)
def test_dropout_without_gradients_is_seen(call: Any, seen: int, tmp_path: Path) -> None:
    recorder, tape = Recorder(tmp_path), RandomReplay()
    tape.flow = DrawFlow(recorder)
    with tape:
        call()
        assert not recorder.events
        with torch.no_grad():
            call()
    assert len(recorder.events) == seen


def test_the_ranks_of_a_program_with_many_epochs_end_with_the_same_one(tmp_path: Path, monkeypatch: Any) -> None:
    ranks = [LoaderProbe(Recorder(tmp_path), SPEC) for _ in range(2)]
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    ended = []
    for epoch in range(1, 6):
        now += 15.0
        for rank in ranks:
            rank.training_epochs = epoch
        ended += [(epoch, number) for number, rank in enumerate(ranks) if rank.is_last(trains=True)]
    assert ended == [(5, 0), (5, 1)]
    assert not ranks[0].is_last(trains=False)


@pytest.mark.parametrize(
    ("names", "values", "found"),
    [
        (["-r", "--resume"], {}, ["--resume", "file"]),
        (["--restore-dir"], {"type": Path}, ["--restore-dir", "folder"]),
        (["--continue"], {"action": "store_true"}, ["--continue", "nothing"]),
        (["--resume"], {"choices": ["never", "allow"]}, None),
        (["--resume-lr"], {}, None),
        (["--given", "--resume"], {}, None),
    ],
)
def test_an_option_that_resumes_is_known(
    names: list[str], values: dict[str, Any], found: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(argparse.Action, "__init__", argparse.Action.__init__)
    monkeypatch.setattr(sys, "argv", ["train.py", "--given=yes"])
    watch_options(tmp_path, SPEC)
    argparse.ArgumentParser().add_argument(*names, **values)
    path = tmp_path / OPTIONS
    assert (json.loads(path.read_text()) if path.exists() else None) == found


def test_numbers_that_a_library_prints_or_writes_for_the_program_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[tuple[Any, str]] = [(builtins, "print"), (logging.Logger, "_log"), (json, "dump"), (json, "dumps")]
    for owner, name in [*places, (csv.DictWriter, "writerow"), (Path, "write_text")]:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    library: dict[str, Any] = {}
    source = "def told(value, depth):\n    told(value, depth - 1) if depth else print('mae', value)\n"
    exec(compile(source, f"{sysconfig.get_paths()['purelib']}/library.py", "exec"), library)  # noqa: S102
    recorder = Recorder(tmp_path)
    ReportProbe(recorder).install()
    library["told"](0.25, 2)
    # A progress bar, or the summary of a trainer.
    library["told"](0.5, 20)
    json.dumps({"epoch": 1, "r2": 0.75})
    csv.DictWriter(io.StringIO(), ["auc"]).writerow({"auc": 0.875})
    (tmp_path / "metrics.txt").write_text("wer 0.125")
    found = [(word, value) for event in recorder.events for value, _, word in event["values"]]
    assert found == [("mae", 0.25), ("r2", 0.75), ("auc", 0.875), ("wer", 0.125)]


@pytest.mark.parametrize(
    ("path", "expected"),
    [("/hf/datasets/data.arrow", True), ("/home/me/.cache/pip/x", True), ("/home/me/project/model.pt", False)],
)
def test_files_of_a_cache_are_those_of_a_library(path: str, expected: bool) -> None:
    folders = {"HOME": "/home/me", "HF_HOME": "/hf", "TRITON_CACHE_DIR": "/triton", "PROJECT_HOME": "/home/me/project"}
    assert is_cached(path, folders) is expected
