"""What the probes record of real calls of the standard library, and what they leave out."""

import builtins
import csv
import io
import json
import logging
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from ddp_doctor.probes.reports import ReportProbe
from ddp_doctor.probes.written_files import is_cached
from ddp_doctor.records.recorder import Recorder


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
