"""What the package assumes about undocumented parts of torch."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import run_forked
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from lit_mnist.distributed.torch_internals import is_gloo_error, write_error_file


def test_torchrun_reads_the_error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    write_error_file("ZeroDivisionError: planted", "Traceback ...", 1_700_000_000.5)
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=3, error_file=str(path))
    assert failure.message["message"] == "ZeroDivisionError: planted"
    assert failure.timestamp == 1_700_000_000


def test_an_error_of_a_gloo_connection_is_recognized(tmp_path: Path) -> None:

    def work() -> int:
        store = dist.FileStore(str(tmp_path / "store"), 2)
        if (other := os.fork()) == 0:
            dist.init_process_group("gloo", store=store, rank=1, world_size=2, timeout=timedelta(seconds=20))
            # An earlier exit would fail the connection of rank 0 instead of the all-reduce.
            store.wait(["connected"])
            os._exit(0)
        dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=timedelta(seconds=20))
        store.set("connected", "")
        os.waitpid(other, 0)
        try:
            dist.all_reduce(torch.ones(2))
        except RuntimeError as error:
            return 0 if is_gloo_error(error) else 1
        return 2

    assert run_forked(work, tmp_path, 40).code == 0
    assert not is_gloo_error(RuntimeError("Connection closed by peer"))
