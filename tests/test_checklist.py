"""The six points of raw DDP's checklist: without any one of the lines that are marked for them, something breaks."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Program, result_of

from lit_mnist.engines import raw_ddp
from lit_mnist.training import checkpoint_folder

SOURCE = Path(raw_ddp.__file__).read_text()
MARKED = [number for number, line in enumerate(SOURCE.splitlines(), start=1) if re.search(r"# \(\d\)$", line)]
POINTS = {
    "set-up and clean-up": "(1)",
    "encapsulation": "(2)",
    "sampler": "(3)",
    "loss scaling": "(4)",
    "one process's output": "(5)",
    "reduction in evaluation": "(6)",
}
FLAGS = ("--devices", 2, "--precision", "16-mixed", "--trainer.accumulate_grad_batches", 2, "--lr", 0.05)
SIZE = ("--batch-size", 8, "--data.train_size", 40, "--data.val_size", 9, "--data.test_size", 21, "--epochs", 3)
CLIP = ("--trainer.gradient_clip_val", 0.5, "--run.trace", "traffic")


class Without(ast.NodeTransformer):
    """Takes away the statement on a line; what a `with` or an `if` holds stays."""

    def __init__(self, line: int) -> None:
        self.line = line

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.stmt) and node.lineno == self.line:
            return node.body if isinstance(node, ast.With | ast.If) else ast.Pass()
        return self.generic_visit(node)


def observed(program: Program, monkeypatch: pytest.MonkeyPatch, run: Callable[..., None]) -> dict[str, Any]:
    """Trains in float16, from a scale that overflows, and returns everything that can be seen of it from outside."""
    writers = program.folder / "writers"
    original, scaler = checkpoint_folder.write_checkpoint, torch.amp.GradScaler.__init__

    def noted(path: Path, content: Any) -> None:
        with writers.open("a") as file:
            file.write(f"{os.environ['RANK']}\n")
        original(path, content)

    def large(self: torch.amp.GradScaler, *args: object, **kwargs: object) -> None:
        scaler(self, *args, **{**kwargs, "init_scale": 2.0**20})  # type: ignore[arg-type]

    def checked(job: Any, rank: Any) -> None:
        """A second training in the same process would need the first one's group to be gone."""
        run(job, rank)
        assert not torch.distributed.is_initialized()

    monkeypatch.setattr(checkpoint_folder, "write_checkpoint", noted)
    monkeypatch.setattr(torch.amp.GradScaler, "__init__", large)
    monkeypatch.setattr(raw_ddp, "run", checked)
    folder = program.folder / "run"
    done = program(*FLAGS, *SIZE, *CLIP, "--run-dir", folder, engine="raw_ddp", timeout=60)
    if done.code:
        return {"code": done.code}
    result = result_of(folder)
    traces = [json.loads((folder / "trace" / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    return {
        "code": 0,
        "weights": [[step["weights"] for step in trace["steps"]] for trace in traces],
        "collectives": [trace["traffic"]["collectives"] for trace in traces],
        "evaluations": (result["test"], result["validation"]),
        "steps": (result["steps"], result["skipped_steps"]),
        "writers": sorted(set(writers.read_text().split())),
    }


def without(line: int) -> Callable[..., None]:
    """Returns the engine without the statement on a line; line 0 is none."""
    tree = ast.fix_missing_locations(Without(line).visit(ast.parse(SOURCE)))
    names: dict[str, Any] = {"__name__": raw_ddp.__name__}
    exec(compile(tree, raw_ddp.__file__, "exec"), names)  # noqa: S102
    return names["run"]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def expected(shared_program: Program) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return observed(shared_program, monkeypatch, without(0))


def test_the_whole_file_trains_and_rank_0_alone_writes(expected: dict[str, Any]) -> None:
    assert expected["code"] == 0
    assert expected["writers"] == ["0"]
    assert 0 < expected["steps"][1] < expected["steps"][0]


def test_every_point_is_marked() -> None:
    for mark in POINTS.values():
        assert any(f"# {mark}" in SOURCE.splitlines()[number - 1] for number in MARKED)


@pytest.mark.parametrize("line", [pytest.param(n, id=SOURCE.splitlines()[n - 1].strip()[:60]) for n in MARKED])
def test_without_a_marked_line_something_breaks(
    program: Program, monkeypatch: pytest.MonkeyPatch, expected: dict[str, Any], line: int
) -> None:
    assert observed(program, monkeypatch, without(line)) != expected
