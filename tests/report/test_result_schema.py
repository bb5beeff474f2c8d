"""`result.json` has the published form; `result_of` validates every result that the tests read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import ROOT, result_schema

from lit_mnist.run.folder import RunFolder

EXAMPLE = {
    "data": {"name": None, "source": None, "sha256": None},
    **{
        "engine": "lightning",
        "model": "mine.Net",
        "data": {"name": None, "source": None, "sha256": None},
        "world_size": 2,
        "device": "cpu",
    },
    **{"precision": "32-true", "config": {}, "checkpoint": None, "steps": 8, "epochs": 1, "stopped_early": None},
    **{"imports": ["mine"], "registered": {}, "cuda_graph": False, "skipped_steps": 0, "threads": 1},
    "train": {
        **{"images_per_s": None, "steps_per_s": None, "seconds": 1.5, "loss": None, "lr": 0.1, "steps": 8},
        "scheduled_steps": 8,
    },
    "validation": {"val_loss": 0.5},
    **{
        "test": None,
        "exact": True,
        "exact_reasons": [],
        "weights_sha256": "0" * 64,
        "seconds_to_first_step": 2.0,
        "peak_memory_bytes": 1,
    },
    **{"peak_gpu_memory_bytes": None, "versions": {}, "commit": None, "command": "lit-mnist", "run_dir": "runs/a"},
}


def errors_of(result: object) -> list[object]:
    return list(result_schema().iter_errors(result))


def test_the_schema_is_valid_and_rejects_other_forms() -> None:
    schema = json.loads((ROOT / "lit_mnist" / "run" / "result.schema.json").read_text())
    result_schema().check_schema(schema)
    assert errors_of(EXAMPLE) == []
    for wrong in ({"steps": -1}, {"weights_sha256": "abc"}, {"more": 1}, {"device": "tpu"}, {"validation": 0.5}):
        assert errors_of({**EXAMPLE, **wrong})
    assert errors_of({key: value for key, value in EXAMPLE.items() if key != "steps"})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_metric_that_is_not_a_number_is_null(tmp_path: Path, value: float) -> None:
    RunFolder(tmp_path).write_result({**EXAMPLE, "test": {"loss": value}})
    written = json.loads((tmp_path / "result.json").read_text(), parse_constant=lambda _: pytest.fail("not JSON"))
    assert written["test"] == {"loss": None}
    assert errors_of(written) == []
