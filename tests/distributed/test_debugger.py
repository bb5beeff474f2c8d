"""A debugger attaches to a rank, stops it at a breakpoint, and lets it continue."""

from __future__ import annotations

import os
import socket
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import Program, result_of, wait_for
from dap import DebugClient

from lit_mnist.distributed.debugger import FIRST_PORT, VARIABLE
from lit_mnist.training import loss

if find_spec("debugpy") is None:
    pytest.skip("debugpy is not installed (the extra `dev`)", allow_module_level=True)
SMALL = ("--data.train_size", 320, "--data.val_size", 100, "--data.test_size", 100, "--run.threads", 1)
LOSS = Path(loss.__file__)
LINE = next(number for number, text in enumerate(LOSS.read_text().splitlines(), 1) if "return" in text)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("engine", ["raw_ddp", "lightning"])
def test_a_breakpoint_in_rank_1_is_hit_and_continued(
    program: Program, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    folder = program.folder / "run"
    with program.started(*SMALL, "--devices", 2, "--run-dir", folder, engine=engine) as group:
        with DebugClient(FIRST_PORT + 1, 60) as client:
            client.ask("initialize", adapterID="test", pathFormat="path", linesStartAt1=True)
            attach = client.send("attach", justMyCode=False)
            client.wait_for("initialized")
            set_ = client.ask("setBreakpoints", source={"path": str(LOSS)}, breakpoints=[{"line": LINE}])
            assert set_["breakpoints"][0]["verified"]
            client.send("configurationDone")
            stopped = client.wait_for("stopped")
            assert (attach, stopped["reason"]) == (2, "breakpoint")
            (frame,) = client.ask("stackTrace", threadId=stopped["threadId"], levels=1)["stackFrames"]
            assert (frame["source"]["path"], frame["line"]) == (str(LOSS), LINE)
            rank = client.ask("evaluate", expression="__import__('os').environ['RANK']", frameId=frame["id"])
            assert rank["result"] == "'1'"
            client.ask("setBreakpoints", source={"path": str(LOSS)}, breakpoints=[])
            client.ask("continue", threadId=stopped["threadId"])
            client.ask("disconnect")
        _, status = wait_for(lambda: (found := os.waitpid(group, os.WNOHANG))[0] and found, 60, program.folder)
    assert os.waitstatus_to_exitcode(status) == 0, (program.folder / "stderr.txt").read_text()
    assert "rank 1 waits for a debugger on 127.0.0.1:5679" in (program.folder / "stderr.txt").read_text()
    assert result_of(folder)["steps"] == 5


@pytest.mark.parametrize("value", ["2", "both", "-1"])
def test_a_rank_that_does_not_exist_is_rejected(program: Program, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, value)
    done = program(*SMALL, "--devices", 2, engine="raw_ddp")
    assert done.code == 2
    assert f"{VARIABLE} is '{value}'" in done.err


def test_a_port_in_use_is_named(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    with socket.create_server(("127.0.0.1", FIRST_PORT)):
        done = program(*SMALL, engine="raw_ddp")
    assert done.code == 2
    assert f"on port {FIRST_PORT}" in done.err
