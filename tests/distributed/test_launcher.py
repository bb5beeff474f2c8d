"""The launcher: ranks start, fail and end together, and nobody outside the machine can reach them."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import pickle
import re
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from conftest import CHILD_ENV, Program, result_of
from faults.hostile import Reduced
from processes import (
    LOOPBACK,
    LOOPBACK_V4,
    ROOT,
    assert_rejected,
    forked,
    kill,
    launched,
    listening,
    named,
    processes_of,
    ranks_of,
    run_forked,
    torchrun,
    wait_for,
)
from torch.distributed import distributed_c10d

from lit_mnist.cli.main import main
from lit_mnist.distributed.launcher import launch
from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.torch_internals import FailedAttempt
from lit_mnist.engines.capabilities import CAPABILITIES, ENGINES
from lit_mnist.errors import InputError, LitMnistError
from lit_mnist.run.monitor import StepMonitor

SMALL = ("--data.train_size", 640, "--data.val_size", 0, "--data.test_size", 100, "--batch-size", 32)
LONG = ("--data.val_size", 0, "--epochs", 50, "--batch-size", 32)
IN_FOLDER = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 200}


def run(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, env={**os.environ, **environment}, check=False, **IN_FOLDER)  # type: ignore[call-overload, no-any-return]


@pytest.mark.slow
def test_forked_ranks_do_not_hang_with_any_openmp_setting(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ("train.py", "--devices", 2, "--max-steps", 5, "--run-dir", folder, "--run.threads", 4, *SMALL)
    done = run(*words, OMP_NUM_THREADS="4")
    assert done.returncode == 0, done.stderr
    result = result_of(folder)
    assert (result["world_size"], result["threads"], result["steps"]) == (2, 4, 5)


AS_RANK_0 = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


def test_the_ranks_share_the_import_of_torch_s_compiler(tmp_path: Path) -> None:
    # Each rank would otherwise import it when it makes its optimizer. A caller of `main` has not deferred it.
    code = """
import sys
from lit_mnist.cli import launch, main
launch.launch = lambda *_, **__: sys.exit("torch._dynamo.eval_frame" not in sys.modules)
main.main(["fit", "--devices", "2", "--max-steps", "1"], engine="raw_ddp")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=CHILD_ENV, timeout=100, check=False)
    assert done.returncode == 0


def test_ranks_do_not_collect_the_objects_that_they_share_with_their_launcher(tmp_path: Path) -> None:
    def program() -> int:
        note = tmp_path.joinpath
        # `run_forked` has frozen them.
        gc.unfreeze()
        launch(
            lambda rank: note(f"rank-{rank.rank}").write_text(str(gc.get_freeze_count())),
            world_size=2,
            max_restarts=0,
            logs=tmp_path / "logs",
        )
        note("launcher").write_text(str(gc.get_freeze_count()))
        return 0

    done = run_forked(program, tmp_path, 60)
    assert done.code == 0, done.err
    found = {name: int((tmp_path / name).read_text()) for name in ("rank-0", "rank-1", "launcher")}
    # torch alone has more.
    assert min(found["rank-0"], found["rank-1"]) > 50_000
    assert found["launcher"] == 0


def test_devices_that_contradict_an_external_launcher_are_rejected(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in AS_RANK_0.items():
        monkeypatch.setenv(name, value)
    assert_rejected(
        program("--devices", 3, "--run-dir", program.folder / "run", *SMALL), "trainer.devices is 3", "2 ranks"
    )
    assert not (program.folder / "run").exists()


def trains(folder: Path) -> bool:
    """Returns whether a run has completed its first step."""
    path = folder / "metrics.csv"
    return path.exists() and len(path.read_text().splitlines()) > 1


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


def no_pickle(*_: object) -> None:
    raise AssertionError("a pickle of another rank was about to be loaded")


@pytest.mark.parametrize(
    "engine",
    [
        name if name in {"lightning", "raw_ddp", "parameter_server"} else pytest.param(name, marks=pytest.mark.slow)
        for name in ENGINES
        if name != "data_parallel"
    ],
)
def test_nothing_listens_beyond_loopback_and_no_rank_loads_a_pickle(
    program: Program, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """The ranks check themselves and their launcher in a step, and complete the run.

    (nn.DataParallel is one process on several GPUs, and has no connections.)
    """
    end_step = StepMonitor.end_step

    def looked(self: StepMonitor, *arguments: Any) -> None:
        end_step(self, *arguments)
        own, parents = listening([os.getpid()]), listening([os.getppid()]) if several else []
        (program.folder / f"listening-{self.rank.rank}").write_text(json.dumps([own, parents]))

    monkeypatch.setattr(StepMonitor, "end_step", looked)
    monkeypatch.setattr(distributed_c10d, "_tensor_to_object", no_pickle)
    several = CAPABILITIES[engine].processes != "one"
    devices = ("--devices", 2 if several else 1)
    folder = program.train(*SMALL, "--max-steps", 3, *devices, engine=engine)
    if engine in {"lightning", "raw_ddp"}:
        assert program("predict", "--ckpt", folder, *devices, engine=engine).code == 0
    found = [json.loads(path.read_text()) for path in program.folder.glob("listening-*")]
    assert len(found) == 1 + several
    for own, parents in found:
        assert bool(own) == several
        assert set(own) <= LOOPBACK
        assert parents == []


@pytest.mark.parametrize("launcher", ["agent", pytest.param("spawn", marks=pytest.mark.slow)])
def test_neither_the_ranks_nor_their_launcher_listen_beyond_loopback(program: Program, launcher: str) -> None:
    folder = program.folder / "run"
    words = ("--devices", 2, "--launcher", launcher, "--run-dir", folder, *LONG)
    with program.started(*words, engine="raw_ddp") as group:
        wait_for(lambda: trains(folder), 100, program.folder)
        ranks = ranks_of(group)
        assert listening([pid for pid in processes_of(group) if pid not in ranks.values()]) == []
        for pid in ranks.values():
            assert set(listening([pid])) == {LOOPBACK_V4}


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_ranks_of_torchrun_do_not_listen_beyond_loopback(program: Program) -> None:
    """torchrun's own store listens on every interface of the machine."""
    folder = program.folder / "run"
    process = torchrun(folder, *LONG)
    try:
        wait_for(lambda: trains(folder), 100)
        ranks = ranks_of(process.pid, named(folder))
        assert ranks
        for pid in ranks.values():
            assert set(listening([pid])) == {LOOPBACK_V4}
    finally:
        for pid in named(folder):
            kill(pid, signal.SIGKILL)
        process.wait(5)


NAMESPACE = """
set -e
hostname elsewhere
ip link set lo up
ip link add outside type veth peer name beyond
ip addr add 10.99.0.1/24 dev outside
ip link set outside up
mount --bind "$1" /etc/hosts
shift
exec "$@"
"""


@pytest.mark.slow
@pytest.mark.needs("namespaces")
def test_a_host_whose_name_resolves_elsewhere_leaves_no_port_open(tmp_path: Path) -> None:
    """By default gloo listens on the address that the host's name resolves to."""
    unshare = ["unshare", "--uts", "--net", "--mount"]
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n10.99.0.1 elsewhere\n")
    (tmp_path / "script").write_text(NAMESPACE)
    folder = tmp_path / "run"
    words = ["train.py", "--devices", "2", "--run-dir", str(folder), *map(str, LONG)]
    environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    command = [*unshare, "bash", str(tmp_path / "script"), str(tmp_path / "hosts"), sys.executable, *words]
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            wait_for(lambda: trains(folder) or process.poll() is not None, 100)
            assert process.poll() is None, (tmp_path / "output").read_text()
            addresses = listening(processes_of(process.pid))
            assert len(addresses) >= 2
            assert set(addresses) <= LOOPBACK
        finally:
            process.kill()
            process.wait(timeout=10)
        wait_for(lambda: not processes_of(process.pid), 5)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_torchrun_with_ranks_that_do_not_fit_the_batch_is_rejected_once(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    words = ("--batch-size", 33, "--run-dir", tmp_path / "run")
    done = run(*torchrun, "-m", "lit_mnist.engines.raw_ddp", *words)
    assert done.returncode != 0
    errors = re.findall(r"^error: .*", done.stderr, re.MULTILINE)
    assert len(errors) == 1
    assert "data.batch_size 33 cannot be split evenly over 2 ranks" in errors[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("engine", "words", "restarts", "message"),
    [
        ("fabric", (), 3, "does not support torchrun's --max-restarts"),
        ("raw_ddp", ("--run.trace", "times"), 0, "give the same --run-dir to all of them"),
    ],
)
def test_input_errors_under_torchrun_are_rejected(
    program: Program, monkeypatch: pytest.MonkeyPatch, engine: str, words: tuple[str, ...], restarts: int, message: str
) -> None:
    for name, value in {**AS_RANK_0, "TORCHELASTIC_MAX_RESTARTS": str(restarts)}.items():
        monkeypatch.setenv(name, value)
    assert_rejected(program(*SMALL, *words, engine=engine), message)
    assert not (program.folder / "runs").exists()


def test_one_rank_of_each_machine_reports_a_rejection(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machines may differ."""
    for name, value in {**AS_RANK_0, "RANK": "2", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert_rejected(program("--data.root", program.folder / "nothing"), "nothing")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    silent = program("--data.root", program.folder / "nothing")
    assert (silent.code, silent.err) == (2, "")


def test_a_port_in_use_is_rejected(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        for name, value in {**AS_RANK_0, "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        assert_rejected(program(*SMALL, engine="raw_ddp"), f"port {port} is in use", "MASTER_PORT")


@pytest.mark.slow
def test_accelerate_launch_with_too_few_processes_is_rejected(tmp_path: Path) -> None:
    launcher = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", 2, "--module")
    words = ("--run-dir", tmp_path / "run", "--max-steps", 2, *SMALL)
    done = run(*launcher, "lit_mnist.engines.with_accelerate", *words)
    assert done.returncode != 0
    assert "error: accelerate launch was asked for several processes and has started one" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_killed_spawned_rank_is_named_and_ends_the_other_ranks(program: Program) -> None:
    victim, folder = 1, program.folder / "run"
    words = ("--devices", 2, "--launcher", "spawn", "--run-dir", folder, *LONG)
    with program.started(*words, engine="raw_ddp") as group:
        wait_for(lambda: trains(folder), 100, program.folder)
        os.kill(ranks_of(group)[victim], signal.SIGKILL)
        _, status = wait_for(lambda: (found := os.waitpid(group, os.WNOHANG))[0] and found, 10)
        # Spawning uses a helper process of Python, which exits shortly after its parent.
        wait_for(lambda: not processes_of(group), 5)
    assert os.waitstatus_to_exitcode(status) == 3
    message = (program.folder / "stderr.txt").read_text()
    assert re.search(rf"Rank {victim} \(process \d+ on .+\) was killed by SIGKILL in step \d+", message)


@pytest.mark.slow
def test_a_signal_stops_spawned_ranks(program: Program) -> None:
    folder = program.folder / "run"
    words = ("--devices", 2, "--launcher", "spawn", "--run-dir", folder, *LONG)
    with program.started(*words, engine="raw_ddp") as group:
        wait_for(lambda: trains(folder), 100, program.folder)
        os.kill(group, signal.SIGTERM)
        _, status = wait_for(lambda: (found := os.waitpid(group, os.WNOHANG))[0] and found, 10)
        wait_for(lambda: not processes_of(group), 5)
    assert os.waitstatus_to_exitcode(status) == 143


def test_simultaneous_exceptions_of_all_ranks_are_shown(tmp_path: Path) -> None:
    def work(rank: Rank) -> None:
        raise ZeroDivisionError("planted")

    done = launched(work, tmp_path, world_size=2)
    assert done.code == 3
    assert "ZeroDivisionError: planted" in done.out.splitlines()[-1]


def test_a_rank_s_own_exception_is_shown(tmp_path: Path) -> None:
    def work(rank: Rank) -> None:
        if rank.rank == 1:
            raise ZeroDivisionError("planted")
        signal.pause()

    done = launched(work, tmp_path, world_size=3)
    assert done.code == 3
    assert re.search(r"Rank 1 \(process \d+ on \S+\) failed:", done.out)
    assert "ZeroDivisionError: planted" in done.out.splitlines()[-1]


def test_an_input_error_in_a_rank_never_causes_a_restart(tmp_path: Path) -> None:
    def work(rank: Rank) -> None:
        with (tmp_path / "attempts").open("a") as file:
            file.write("x")
        if rank.is_first:
            raise InputError("the disk is full")
        signal.pause()

    done = launched(work, tmp_path, world_size=2, max_restarts=5)
    assert (done.code, done.out) == (2, "the disk is full\n")
    assert len((tmp_path / "attempts").read_text()) <= 2


class Attacker:
    """Another user of the machine, who watches a shared folder and plants a pickle at the path of each removed file.

    Args:
        folder: The shared folder.
        executed: A file that the planted pickle makes when it is loaded.
    """

    _IN_DELETE = 0x200
    _EVENT = struct.Struct("iIII")

    def __init__(self, folder: Path, executed: Path) -> None:
        self.folder = folder
        self.planted: list[str] = []
        self._pickle = pickle.dumps(Reduced(os.system, f"touch {executed}"), 2)
        libc = ctypes.CDLL(None, use_errno=True)
        self._events = libc.inotify_init1(os.O_NONBLOCK)
        assert libc.inotify_add_watch(self._events, os.fsencode(folder), self._IN_DELETE) >= 0

    def plant(self) -> None:
        """Plants a file under each name that was removed since the last call."""
        with suppress(BlockingIOError):
            while events := os.read(self._events, 1 << 16):
                while events:
                    *_, length = self._EVENT.unpack_from(events)
                    name = events[self._EVENT.size : self._EVENT.size + length].rstrip(b"\0").decode()
                    events = events[self._EVENT.size + length :]
                    if name.startswith("pytorch-errorfile-"):
                        (self.folder / name).write_bytes(self._pickle)
                        self.planted.append(name)


def raise_when_told(folder: Path, rank: Rank) -> None:
    """Records the temporary folder of this rank, and raises an error on request of the test."""
    (folder / f"temporary-{os.getpid()}").write_text(tempfile.gettempdir())
    while not (folder / "raise").exists():
        time.sleep(0.01)
    raise ZeroDivisionError("planted")


@pytest.mark.parametrize(("launcher", "restarts"), [("agent", 1), pytest.param("spawn", 1, marks=pytest.mark.slow)])
def test_files_that_another_user_plants_in_the_temporary_folder_are_not_executed(
    tmp_path: Path, launcher: str, restarts: int
) -> None:
    """torch creates a file there, removes it, and unpickles what it finds at this path after a rank has failed."""
    shared, executed = make(tmp_path / "shared"), tmp_path / "executed"
    attacker = Attacker(shared, executed)
    work, logs = partial(raise_when_told, tmp_path), tmp_path / "logs"

    def start() -> int:
        os.environ["TMPDIR"], tempfile.tempdir = str(shared), None
        try:
            method = "spawn" if launcher == "spawn" else None
            launch(work, world_size=2, max_restarts=restarts, logs=logs, start_method=method)
        except LitMnistError as error:
            print(error)
            return error.exit_code
        return 0

    with forked(start, tmp_path) as group:
        wait_for(lambda: len(list(tmp_path.glob("temporary-*"))) == 2, 60, tmp_path)
        attacker.plant()
        modes = [stat.S_IMODE(path.stat().st_mode) for path in shared.iterdir() if path.is_dir()]
        (tmp_path / "raise").touch()

        def ended() -> tuple[int, int] | None:
            attacker.plant()
            found, status = os.waitpid(group, os.WNOHANG)
            return (found, status) if found else None

        _, status = wait_for(ended, 60, tmp_path)
        wait_for(lambda: not processes_of(group), 5)
    out = (tmp_path / "stdout.txt").read_text()
    assert not executed.exists()
    assert os.waitstatus_to_exitcode(status) == 3, (tmp_path / "stderr.txt").read_text()
    assert "ZeroDivisionError: planted" in out
    assert attacker.planted == []
    assert modes == [0o700]
    # All ranks, including restarted ones, use the user's folder, and the launch has removed its private folder.
    assert {path.read_text() for path in tmp_path.glob("temporary-*")} == {str(shared)}
    assert len(list(tmp_path.glob("temporary-*"))) == 2 * (1 + restarts)
    assert list(shared.iterdir()) == []


def test_a_rank_killed_by_an_unnamed_signal_is_named(tmp_path: Path) -> None:
    def work(rank: Rank) -> None:
        if rank.rank == 1:
            os.kill(os.getpid(), signal.SIGRTMIN + 1)
        signal.pause()

    done = launched(work, tmp_path, world_size=2)
    assert done.code == 3, done.err
    assert re.fullmatch(r"Rank 1 \(process \d+ on \S+\) was killed by SIGRTMIN\+1\.\n", done.out)


@pytest.mark.parametrize("start", ["launch", "main"])
def test_a_launch_from_a_thread_is_rejected(tmp_path: Path, start: str) -> None:
    """The kernel kills the ranks when the thread ends, and Python handles signals in the main thread."""

    def work(rank: Rank) -> None:
        raise AssertionError("started")

    def in_thread() -> int:
        try:
            if start == "main":
                return main(["--devices", "2", "--run-dir", str(tmp_path / "run"), *map(str, SMALL)])
            launch(work, world_size=2, max_restarts=0, logs=tmp_path / "logs")
        except LitMnistError as error:
            print(error, file=sys.stderr)
            return error.exit_code
        return 0

    def begin() -> int:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(in_thread).result()

    done = run_forked(begin, tmp_path, 30)
    assert done.code == 2, done.err
    assert "main thread" in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGUSR1], ids=lambda signum: signum.name)
def test_a_program_that_launches_ranks_keeps_its_signal_handlers(tmp_path: Path, signum: signal.Signals) -> None:
    """As a notebook does: a signal stops the ranks, and then reaches the program's own handler."""
    received: list[int] = []

    def interrupt(rank: Rank) -> None:
        if rank.is_first:
            os.kill(os.getppid(), signum)
        signal.pause()

    def work() -> int:
        signal.signal(signum, lambda number, _: received.append(number))
        before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
        launch(lambda rank: None, world_size=2, max_restarts=0, logs=tmp_path / "logs")
        assert not received
        with suppress(LitMnistError):
            launch(interrupt, world_size=2, max_restarts=0, logs=tmp_path / "logs")
        assert received == [signum]
        assert before == [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
        return 0

    done = run_forked(work, tmp_path, 30)
    assert done.code == 0, done.out + done.err


def test_a_signal_at_the_end_of_a_rank_does_not_block_the_launcher(tmp_path: Path) -> None:
    """torch's agent would wait forever for a rank that ended while it was waiting for the others."""

    def work(rank: Rank) -> None:
        def signal_again_and_again() -> None:
            time.sleep(0.005)
            while True:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.001)

        Thread(target=signal_again_and_again, daemon=True).start()

    # A signal that arrives before a rank has ended stops the run, as it should.
    assert launched(work, tmp_path, world_size=2).code in {0, 128 + signal.SIGTERM}


def test_a_rank_that_fails_after_the_one_that_lost_it_is_reported() -> None:
    first = FailedAttempt({0: None, 1: 3, 2: None}, {0: 10, 1: 11, 2: 12})
    # The agent has killed rank 2.
    later = FailedAttempt({0: 2, 1: 3, 2: -9}, {0: 10, 1: 11, 2: 12})
    assert first.followed_by(later) == FailedAttempt({0: 2, 1: 3, 2: None}, first.pids)
