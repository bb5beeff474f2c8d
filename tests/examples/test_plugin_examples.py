"""The examples of the plugins run under a stock Trainer, and the page on registered networks is true."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from conftest import ROOT, Program, result_of
from processes import run_forked

from examples.plugins import batch_norm, checkpoint_io, exact_checkpoint, failure_report, float16, metric, sampler


def output(work: Callable[[], None], folder: Path) -> str:
    done = run_forked(lambda: work() or 0, folder)
    assert done.code == 0, done.err
    return done.out


def test_the_examples_run_on_one_rank(tmp_path: Path) -> None:
    assert "30 steps of 64 samples" in output(lambda: sampler.main(devices=1), tmp_path)
    assert "running mean" in output(lambda: batch_norm.main(devices=1), tmp_path)
    # The first steps overflow.
    assert float(output(float16.main, tmp_path).split()[-1]) < 2.0**20
    assert "is damaged" in output(checkpoint_io.main, tmp_path)
    assert re.search(r"which is \d+/101", output(lambda: metric.main(devices=1), tmp_path))
    failed = output(lambda: failure_report.main(str(tmp_path / "failed")), tmp_path)
    assert f"rank 0 failed in step 5 with the samples {list(range(80, 96))}" in failed
    whole = output(lambda: exact_checkpoint.main(str(tmp_path / "whole")), tmp_path)
    assert output(lambda: exact_checkpoint.main(str(tmp_path / "whole")), tmp_path).split()[-1] == whole.split()[-1]


def test_the_example_of_the_page_on_networks_trains(program: Program) -> None:
    page = (ROOT / "docs" / "registered_network.md").read_text()
    module, commands = re.findall(r"```(?:python|bash)\n(.*?)```", page, re.DOTALL)
    (program.folder / "mine.py").write_text(module)
    words = commands.replace("\\\n", "").splitlines()[0].removeprefix("python train.py ").split()
    folder = program.train(*words)
    assert result_of(folder)["world_size"] == 2
    assert result_of(folder)["test"]["accuracy"] > 0.9
