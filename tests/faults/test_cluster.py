"""Slurm's tasks become ranks, a job that receives a warning is queued again and resumes, Kubernetes' job file works.

Slurm itself is not here: `srun` and `scontrol` are stand-ins, which start the tasks with Slurm's variables on this
machine, pass a signal on to them, and record what they receive.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest
import yaml
from conftest import Program, result_of
from processes import ROOT, assert_rejected, processes_of, wait_for
from torch.distributed.run import config_from_args, parse_args

from faults.conftest import SMALL, RecordMetric
from lit_mnist.cli.request import parse
from lit_mnist.distributed.rank import Rank, adopt_slurm, launched_from_outside
from lit_mnist.distributed.rendezvous import choose_interface
from lit_mnist.errors import InputError

TASK = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def task(monkeypatch: pytest.MonkeyPatch, **changes: str | None) -> None:
    """Sets the environment of a task of srun, with some variables changed or removed."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        # Restores the variables that the test sets.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in {**TASK, **changes}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"SLURM_STEP_TASKS_PER_NODE": "2,2,2"},
        {"SLURM_STEP_TASKS_PER_NODE": "2"},
        {"SLURM_STEP_TASKS_PER_NODE": None, "SLURM_NTASKS_PER_NODE": "2"},
        {"SLURM_STEP_TASKS_PER_NODE": None, "SLURM_NNODES": "3"},
        {"SLURM_STEP_NUM_TASKS": None, "SLURM_NTASKS": "6"},
    ],
)
def test_a_task_of_srun_is_a_rank(monkeypatch: pytest.MonkeyPatch, changes: dict[str, str | None]) -> None:
    task(monkeypatch, **changes)
    adopt_slurm()
    assert launched_from_outside()
    assert Rank.from_environment() == Rank(rank=3, world_size=6, local_rank=1, local_world_size=2)
    assert Rank.from_environment().num_nodes == 3


@pytest.mark.parametrize(
    "changes",
    [
        # A batch script, or a shell of salloc, has the job's variables but no step.
        {"SLURM_STEP_ID": None, "SLURM_PROCID": "0", "SLURM_NTASKS": "6"},
        # A shell of salloc that is a step: 0xFFFFFFFA.
        {"SLURM_STEP_ID": "4294967290"},
        # `srun --ntasks 1 python train.py --devices 2` within a larger job.
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "6"},
    ],
)
def test_a_process_that_is_not_one_of_several_tasks_trains_alone(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str | None]
) -> None:
    task(monkeypatch, **changes)
    adopt_slurm()
    assert not launched_from_outside()


@pytest.fixture(scope="module")
def alone(shared_program: Program) -> dict[str, Any]:
    """The result of a run without Slurm's variables, which is that of every engine."""
    with pytest.MonkeyPatch.context() as patch:
        task(patch, **dict.fromkeys(TASK))
        return result_of(shared_program.train("--max-steps", 2, *SMALL, engine="single"))


@pytest.mark.parametrize("engine", ["lightning", "fabric", "raw_ddp"])
def test_a_single_process_in_a_job_of_several_tasks_trains_alone(
    program: Program, monkeypatch: pytest.MonkeyPatch, alone: dict[str, Any], engine: str
) -> None:
    """Neither Lightning's detection of Slurm nor the address of the job applies to it: no other rank is waited for."""
    task(monkeypatch, SLURM_STEP_ID=None, SLURM_PROCID="0", SLURM_NTASKS="6", MASTER_ADDR="192.0.2.1", MASTER_PORT="1")
    folder = program.train("--max-steps", 2, *SMALL, engine=engine)
    found = result_of(folder)
    assert found["world_size"] == 1
    for key in ("weights_sha256", "steps", "validation", "test"):
        assert found[key] == alone[key], key
    assert [path.name for path in (folder / "logs").glob("rank-*.log")] == ["rank-0.log"]


def test_ranks_of_torchrun_within_a_task_are_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    task(monkeypatch)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    adopt_slurm()
    assert Rank.from_environment() == Rank(rank=1, world_size=2, local_rank=1, local_world_size=2)


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_TASKS_PER_NODE": "2,1"},
        {"SLURM_STEP_TASKS_PER_NODE": "2(x2),1"},
        {"SLURM_STEP_TASKS_PER_NODE": None, "SLURM_NNODES": "4"},
    ],
)
def test_unequal_numbers_of_tasks_are_rejected(monkeypatch: pytest.MonkeyPatch, changes: dict[str, str | None]) -> None:
    task(monkeypatch, **changes)
    with pytest.raises(InputError, match="unequal numbers of tasks"):
        adopt_slurm()


def test_tasks_without_a_master_address_are_rejected(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    task(monkeypatch, MASTER_ADDR=None, MASTER_PORT=None)
    assert_rejected(program(*SMALL), "MASTER_ADDR and MASTER_PORT is not set", "batch script")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"LOCAL_WORLD_SIZE": None}, "LOCAL_WORLD_SIZE is not set"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not set"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE must be a number, but is 'two'"),
    ],
)
def test_an_incomplete_environment_of_ranks_is_rejected(
    program: Program, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str | None], message: str
) -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**ranks, **changes}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    assert_rejected(program("--max-steps", 1), message)


def test_the_interface_that_leads_to_the_master_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    monkeypatch.setattr("lit_mnist.distributed.rendezvous._REMOTE_ADDRESS", "no.such.host.invalid")
    choose_interface()
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    choose_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "of-the-user")
    choose_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "of-the-user"


def test_the_kubernetes_job_is_valid_for_torchrun_and_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = yaml.safe_load((ROOT / "configs" / "cluster" / "pytorchjob.yaml").read_text())["spec"]
    policy, worker = spec["elasticPolicy"], spec["pytorchReplicaSpecs"]["Worker"]
    [container] = worker["template"]["spec"]["containers"]
    # The variables that the operator derives from the elastic policy.
    monkeypatch.setenv("PET_RDZV_BACKEND", policy["rdzvBackend"])
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "lit-mnist-worker-0:23456")
    monkeypatch.setenv("PET_RDZV_ID", policy["rdzvId"])
    monkeypatch.setenv("PET_RDZV_CONF", ",".join(f"{entry['key']}={entry['value']}" for entry in policy["rdzvConf"]))
    monkeypatch.setenv("PET_NNODES", f"{policy['minReplicas']}:{policy['maxReplicas']}")
    monkeypatch.setenv("PET_NPROC_PER_NODE", spec["nprocPerNode"])
    monkeypatch.setenv("PET_MAX_RESTARTS", str(policy["maxRestarts"]))
    # torchrun's parser sets it in the environment of this process.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert container["command"][0] == "torchrun"
    config, _, words = config_from_args(parse_args(container["command"][1:]))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 2, 2)
    assert (config.rdzv_backend, config.run_id, config.max_restarts) == ("c10d", "lit-mnist", 10)
    assert config.rdzv_configs["read_timeout"] == "15"
    run = parse(words[words.index("train.py") + 1 :]).experiment().run
    assert run.resume == "auto"
    assert (run.dir, run.save_seconds) == ("/runs/lit-mnist", 60)
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in worker["template"]["spec"]["volumes"]}


SRUN = """#!/bin/bash
# Starts two tasks as if each had a machine of its own, passes SIGUSR1 on, and ends with the highest exit code.
echo "$$" > srun.pid
while [[ "$1" == --* ]]; do shift; done
for task in 0 1; do
    SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE='1(x2)' SLURM_PROCID=$task SLURM_LOCALID=0 "$@" &
    tasks+=("$!")
done
trap 'kill -USR1 "${tasks[@]}"' USR1
highest=0
for pid in "${tasks[@]}"; do
    # A trap interrupts `wait`, which must be repeated.
    while wait "$pid"; code=$?; kill -0 "$pid" 2> /dev/null; do :; done
    [ "$code" -gt "$highest" ] && highest=$code
done
exit "$highest"
"""
SCONTROL = """#!/bin/bash
echo "$@" >> scontrol.txt
if [ "$1" = show ]; then printf '127.0.0.1\\n127.0.0.1\\n'; fi
"""


def job_id() -> int:
    """Returns a job's number from which a free port follows, as configs/cluster/slurm.sbatch says."""
    for number in range(os.getpid() % 10000, 20000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", 20000 + number % 10000))
            except OSError:
                continue
        return number
    raise AssertionError("no port from 20000 to 29999 is free")


@pytest.mark.slow
def test_a_job_is_requeued_before_its_time_limit_and_resumes(program: Program, record_metric: RecordMetric) -> None:
    folder, job = program.folder, job_id()
    for name, script in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    (folder / "train.py").symlink_to(ROOT / "train.py")
    run = folder / "runs" / f"slurm-{job}"
    words = (*SMALL, "--epochs", 10)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")},
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        **{"SLURM_JOB_ID": str(job), "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_CPUS_PER_TASK": "1"},
        **{"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"},
    }
    command = ["bash", str(ROOT / "configs" / "cluster" / "slurm.sbatch"), *map(str, words)]

    def started() -> subprocess.Popen[bytes]:
        with (folder / "output.txt").open("a") as output:
            return subprocess.Popen(
                command, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
            )

    def ended(process: subprocess.Popen[bytes], timeout: float) -> int:
        wait_for(lambda: process.poll() is not None, timeout)
        assert not processes_of(process.pid)
        return int(process.returncode)

    first = started()
    try:
        metrics = run / "metrics.csv"
        trains = lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 1  # noqa: E731
        wait_for(lambda: trains() or first.poll() is not None, 120)
        os.kill(int((folder / "srun.pid").read_text()), signal.SIGUSR1)
        assert ended(first, 30) == 128 + signal.SIGUSR1, (folder / "output.txt").read_text()
    finally:
        first.kill()
    assert (folder / "scontrol.txt").read_text().splitlines()[-1] == f"requeue {job}"
    assert "Stopped by SIGUSR1 after step" in (folder / "output.txt").read_text()
    assert not (run / "result.json").exists()

    second = started()
    try:
        assert ended(second, 150) == 0, (folder / "output.txt").read_text()
    finally:
        second.kill()
    assert "resuming from" in (folder / "output.txt").read_text()
    assert (folder / "scontrol.txt").read_text().count("requeue") == 1
    undisturbed = program.train("--devices", 2, *words)
    assert result_of(run)["weights_sha256"] == result_of(undisturbed)["weights_sha256"]
    record_metric(
        "Slurm's warning", "the job ends with 138, is queued again, and ends bit-identical to an undisturbed run"
    )
