"""The examples of the plugins' page run as they are printed, on two ranks."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch.distributed as dist
from conftest import ROOT
from ranks import results_of_ranks

from lit_mnist import plugins
from lit_mnist.distributed.rank import Rank

PAGE = (ROOT / "docs" / "plugins.md").read_text()


def test_the_examples_of_the_page_run(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)

    def work(rank: Rank) -> dict[str, int]:
        os.chdir(tmp_path)
        names: dict[str, Any] = {}
        for block in blocks:
            exec(compile(block, "docs/plugins.md", "exec"), names)  # noqa: S102
            dist.barrier()
        data = names["Data"]()
        trainer = names["Trainer"](use_distributed_sampler=False, **names["on_cpus"])
        trainer.fit(names["Classifier"](), datamodule=data)
        # 15 batches of 64 of 1,000 samples, and 40 are left.
        return {**data.sampler.state_dict(), "steps": trainer.global_step}

    for found in results_of_ranks(work, tmp_path / "ranks", 2):
        assert (found["epoch"], found["batch"], found["steps"]) == (1, 0, 15)
    assert (tmp_path / "checkpoints" / "best.ckpt").exists()


def test_each_section_is_of_a_public_name() -> None:
    sections = re.findall(r"^## (\w+)$", PAGE, re.MULTILINE)
    assert len(sections) >= 5
    for name in sections:
        assert name in plugins.__all__
        assert f"| `{name}` |" in PAGE
        assert getattr(plugins, name).__doc__
