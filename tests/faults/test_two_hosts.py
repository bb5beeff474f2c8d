"""Two machines, made of network namespaces: a run that loses a rank, an agent or the link ends bit-identical.

It holds for MNIST and for a user's module: there is one run system.

The commands are those of docs/cluster.md. Each machine has its own name, which resolves to 127.0.1.1 on it, as many
installations do: what listens there is reached by no other machine.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import Program, result_of
from processes import ROOT, wait_for

from faults.conftest import SMALL, RecordMetric

pytestmark = pytest.mark.needs("namespaces")

USER = ROOT / "examples" / "user_module"
MNIST = (*SMALL, "--run.timeout", 15)
# What is trained: the program in the place of `train.py`, its engine, and the words of a run.
TRAINED: dict[str, tuple[str, str, tuple[object, ...]]] = {
    "lightning": ("train.py", "lightning", MNIST),
    "raw_ddp": ("-m lit_mnist.engines.raw_ddp", "raw_ddp", MNIST),
    "user": (
        "train.py",
        "lightning",
        ("--config", USER / "spirals.yaml", "--import", "spirals", "--run.threads", 1, "--run.timeout", 15),
    ),
}
# 20 steps per epoch, or 18 of the user's module: enough for a fault and for a resume.
SHORT, LONG = ("--epochs", 2), ("--epochs", 25)
ENTER = """
set -e
hostname "$1"
mount --bind "$2" /etc/hosts
# No name server is reached from here, and waiting for one takes 20 seconds.
mount --bind /dev/null /etc/resolv.conf
shift 2
exec "$@"
"""


class Host:
    """A machine: a network namespace with a name, an address and one cable."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number, self.folder = number, folder
        self.name, self.address = f"host-{number}", f"10.77.0.{number}"
        self.space = f"lit-mnist-{os.getpid()}-{number}"
        self.command = ""
        self.agent: subprocess.Popen[bytes] | None = None
        others = "".join(f"10.77.0.{other} host-{other}\n" for other in (1, 2) if other != number)
        (folder / f"{self.name}.hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {self.name}\n{others}")

    def ip(self, *words: object) -> None:
        subprocess.run(["ip", "-n", self.space, *map(str, words)], check=True, capture_output=True, timeout=10)

    def pull_out(self) -> None:
        """Disconnects the cable: the routes vanish, and the interface of the other machine loses its carrier."""
        self.ip("link", "set", "cable", "down")

    def lose_all(self, other: Host) -> None:
        """Sends packets for the other machine to one that does not exist: they are lost silently."""
        self.ip("neigh", "replace", other.address, "lladdr", "02:00:00:00:00:99", "dev", "cable", "nud", "permanent")

    def lose_nothing(self, other: Host) -> None:
        self.ip("neigh", "del", other.address, "dev", "cable")

    def plug_in(self) -> None:
        self.ip("link", "set", "cable", "up")
        self.ip("route", "replace", "default", "via", f"10.77.0.{3 - self.number}")

    def start(self) -> None:
        """Starts the command of this machine, whose output is appended to `output`."""
        enter = ["ip", "netns", "exec", self.space, "unshare", "--uts", "bash", "-c", ENTER, "enter"]
        own = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
        own["PYTHONPATH"] = str(USER)
        own["PATH"] = f"{Path(sys.executable).parent}:{own['PATH']}"
        with self.output.open("a") as output:
            self.agent = subprocess.Popen(
                [*enter, self.name, str(self.folder / f"{self.name}.hosts"), "bash", "-ec", self.command],
                cwd=ROOT,
                env=own,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def output(self) -> Path:
        return self.folder / f"{self.name}.txt"

    def pids(self) -> list[int]:
        """Returns the processes of this machine."""
        command = ["ip", "netns", "pids", self.space]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=10)
        return [int(pid) for pid in done.stdout.split()]

    def remove(self) -> None:
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.agent:
            self.agent.wait(timeout=10)
        subprocess.run(["ip", "netns", "del", self.space], check=False, capture_output=True, timeout=10)


Hosts = tuple[Host, Host]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    first, second = Host(1, tmp_path), Host(2, tmp_path)
    try:
        for host in (first, second):
            subprocess.run(["ip", "netns", "add", host.space], check=True, timeout=10)
        first.ip("link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", second.space)
        for host in (first, second):
            host.ip("link", "set", "lo", "up")
            host.ip("addr", "add", f"{host.address}/24", "dev", "cable")
        for host in (first, second):
            host.plug_in()
        yield first, second
    finally:
        for host in (first, second):
            host.remove()


def documented(marker: str) -> str:
    """Returns the commands of docs/cluster.md that contain a word."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "docs" / "cluster.md").read_text(), re.MULTILINE | re.DOTALL)
    [found] = [block for block in blocks if marker in block]
    return str(found)


def started(hosts: Hosts, *words: object, trained: str, marker: str = "--rdzv-endpoint") -> Path:
    """Starts a run on both machines by the documented commands, with these words at their end; returns its folder."""
    found = re.search(r"/shared/runs/\S+", documented(marker))
    assert found
    folder = hosts[0].folder / "run"
    program, _, own = TRAINED[trained]
    for host in hosts:
        # In a separate process, so that a test kills the agent.
        command = documented(marker).strip().replace("torchrun ", "exec torchrun ", 1)
        command = command.replace("--node-rank 0", f"--node-rank {host.number - 1}").replace(found[0], str(folder))
        command = command.replace("train.py", program).replace("--save-every 60s", "--save-every 5")
        host.command = f"{command} {shlex.join(map(str, (*own, *words)))}"
        host.start()
    return folder


def read_output(hosts: Hosts) -> str:
    return "\n".join(f"--- {host.name}\n{host.output.read_text()}" for host in hosts)


def until_done(hosts: Hosts, timeout: float, *, supervised: bool = False) -> int:
    """Waits until both agents have succeeded and no process remains.

    Args:
        hosts: The machines.
        timeout: Seconds until then.
        supervised: Whether an agent that ends otherwise is started again; returns how often.
    """
    began, again = time.monotonic(), 0
    while (codes := [host.agent.poll() for host in hosts if host.agent]) != [0, 0]:
        assert time.monotonic() - began < timeout, read_output(hosts)
        for host, code in zip(hosts, codes, strict=True):
            if code:
                assert supervised, read_output(hosts)
                host.start()
                again += 1
        time.sleep(0.1)
    wait_for(lambda: not any(host.pids() for host in hosts), 5)
    return again


def wait_until(condition: Callable[[], object], timeout: float, hosts: Hosts) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout, read_output(hosts)
        time.sleep(0.05)


def kill(host: Host) -> None:
    """Kills the agent of a machine, and thereby its ranks."""
    assert host.agent
    host.agent.kill()
    host.agent.wait(timeout=10)
    wait_for(lambda: not host.pids(), 5)


def ranks(host: Host) -> list[int]:
    """Returns the processes of a machine's ranks."""
    return [pid for pid in host.pids() if host.agent and pid != host.agent.pid]


def until_saved(hosts: Hosts, folder: Path, timeout: float = 90) -> None:
    """Waits for the run's first checkpoint."""
    wait_until((folder / "checkpoints" / "last.ckpt").exists, timeout, hosts)


def undisturbed(program: Program, *words: object, trained: str) -> str:
    """Returns the digest of the weights of an uninterrupted run on one machine."""
    _, engine, own = TRAINED[trained]
    shutil.copytree(USER / "spirals", program.folder / "spirals")
    return str(result_of(program.train("--devices", 2, *own, *words, engine=engine))["weights_sha256"])


@pytest.mark.timeout(180)
@pytest.mark.parametrize("trained", [pytest.param("raw_ddp", marks=pytest.mark.slow), "user"])
def test_two_machines_are_bit_identical_to_one(
    hosts: Hosts, program: Program, trained: str, record_metric: RecordMetric
) -> None:
    folder = started(hosts, *SHORT, trained=trained)
    began = time.monotonic()
    until_done(hosts, 150)
    seconds = time.monotonic() - began
    assert result_of(folder)["weights_sha256"] == undisturbed(program, *SHORT, trained=trained)
    record_metric(f"two hosts, undisturbed, {trained}", f"the bits of one host; {seconds:.0f} s from start to end")


@pytest.mark.slow
@pytest.mark.parametrize("trained", TRAINED)
def test_a_rank_killed_on_one_machine_is_replaced(
    hosts: Hosts, program: Program, trained: str, record_metric: RecordMetric
) -> None:
    folder = started(hosts, *SHORT, "--inject", "kill:rank=1,step=20", trained=trained)
    began = time.monotonic()
    until_done(hosts, 250)
    seconds = time.monotonic() - began
    assert (folder / "logs" / "injected").exists()
    assert "resuming from" in read_output(hosts)
    assert result_of(folder)["weights_sha256"] == undisturbed(program, *SHORT, trained=trained)
    record_metric(f"two hosts, rank killed, {trained}", f"bit-identical; {seconds:.0f} s from start to end")


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["raw_ddp", "user"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_agent_can_be_restarted(
    hosts: Hosts, program: Program, victim: int, trained: str, record_metric: RecordMetric
) -> None:
    folder = started(hosts, *LONG, trained=trained)
    until_saved(hosts, folder)
    began = time.monotonic()
    kill(hosts[victim])
    time.sleep(3)
    hosts[victim].start()
    again = until_done(hosts, 250, supervised=True)
    seconds = time.monotonic() - began
    # The agent of the first machine holds the store. Without it the other agent ends, too.
    assert again == 1 - victim, read_output(hosts)
    assert "resuming from" in read_output(hosts)
    assert result_of(folder)["weights_sha256"] == undisturbed(program, *LONG, trained=trained)
    record_metric(f"two hosts, agent {victim} killed, {trained}", f"bit-identical, {seconds:.0f} s after the kill")


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["raw_ddp", "user"])
def test_without_elastic_rendezvous_a_lost_rank_ends_all_and_the_same_commands_resume(
    hosts: Hosts, program: Program, trained: str, record_metric: RecordMetric
) -> None:
    folder = started(hosts, *LONG, trained=trained, marker="--master-addr")
    until_saved(hosts, folder)
    began = time.monotonic()
    for pid in ranks(hosts[1]):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: all(host.agent and host.agent.poll() is not None for host in hosts), 100, hosts)
    assert [host.agent.returncode for host in hosts if host.agent] == [1, 1], read_output(hosts)
    seconds = time.monotonic() - began
    for host in hosts:
        host.start()
    until_done(hosts, 150)
    assert result_of(folder)["weights_sha256"] == undisturbed(program, *LONG, trained=trained)
    record_metric(
        f"two hosts, static, rank killed, {trained}", f"ended after {seconds:.0f} s, and resumed bit-identically"
    )


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["raw_ddp", "user"])
@pytest.mark.parametrize("fault", ["link down", "packets dropped"])
def test_a_broken_link_ends_or_restarts_both_machines(
    hosts: Hosts, program: Program, fault: str, trained: str, record_metric: RecordMetric
) -> None:
    first, second = hosts
    folder = started(hosts, *LONG, trained=trained)
    until_saved(hosts, folder)
    # The ranks send a heartbeat every second. Its absence is noticed only after the first one.
    time.sleep(3)
    before = {host.name: ranks(host) for host in hosts}
    began = time.monotonic()
    if fault == "link down":
        second.pull_out()
    else:
        first.lose_all(second)
        second.lose_all(first)
    seconds: dict[str, float] = {}
    while len(seconds) < 2:
        assert time.monotonic() - began < 60, read_output(hosts)
        for host in hosts:
            if host.name not in seconds and not set(ranks(host)) & set(before[host.name]):
                seconds[host.name] = time.monotonic() - began
        time.sleep(0.1)
    assert re.search(r"warning: Rank 1 \(process \d+ on host-2\) has sent no heartbeat for 1\d s", read_output(hosts))
    assert max(seconds.values()) < 30
    if fault == "link down":
        second.plug_in()
    else:
        first.lose_nothing(second)
        second.lose_nothing(first)
    mended = time.monotonic()
    again = until_done(hosts, 250, supervised=True)
    assert result_of(folder)["weights_sha256"] == undisturbed(program, *LONG, trained=trained)
    gone = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
    record_metric(
        f"two hosts, {fault}, {trained}",
        f"the ranks are gone after: {gone}; agents started again: {again}; "
        f"bit-identical, {time.monotonic() - mended:.0f} s after the link is mended",
    )
