"""The long tests of the whole: a hundred kills, two hosts, the wheel, other versions, mistakes that tests must find.

They take about an hour on two cores. Those of other versions download gigabytes, and need as much space in the
temporary folder.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from launching import ROOT, Command, Completed, start

from lit_mnist.plugins.checkpoint_io import read_checkpoint

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


def run(*words: object, cwd: Path | None = None, timeout: float = 300, **environment: str) -> Completed:
    """Runs a command, and leaves no process of it."""
    process = subprocess.Popen(
        [str(word) for word in words],
        cwd=cwd,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return Completed(process.returncode, output)


def succeed(*words: object, **options: Any) -> str:
    completed = run(*words, **options)
    assert completed.code == 0, completed.output
    return completed.output


def copy_checkout(folder: Path) -> Path:
    """Returns a copy of the checkout: a build or a mistake must not change the checkout."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "runs", "build", "dist", "*.egg-info")
    shutil.copytree(ROOT, folder, symlinks=True, ignore=ignored)
    return folder


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


# --- a hundred kills

KILLS = 100
# Each step takes 20 ms or more, so that the last kill comes before the end on any machine.
SLOW = "--trainer.callbacks+=others.Fault --trainer.callbacks.kind=slow"
LONG = (
    "--devices 2 --precision 32-true --batch-size 16 --max-steps 4000 --data.augment shift "
    "--trainer.limit_train_batches 700 --data.val_size 500 --trainer.enable_progress_bar false "
    "--trainer.callbacks+=lit_mnist.plugins.ExactCheckpoint --trainer.callbacks.every_n_train_steps=5"
)


def test_killed_a_hundred_times_and_resumed(train: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    folder, generator, steps = tmp_path / "killed", random.Random(1), [0]
    last = folder / "checkpoints" / "last.ckpt"

    def begin(words: str) -> tuple[Command, float]:
        return start(words.split(), tmp_path / "output", tmp_path), time.monotonic()

    def has_saved() -> bool:
        return last.exists() and read_checkpoint(last)["global_step"] > steps[-1]

    running, begun = begin(f"{LONG} {SLOW} --run-dir {folder}")
    try:
        for kill in range(KILLS):
            if kill % 2 == 0:  # in the training
                running.wait_for(has_saved)
                start_up = time.monotonic() - begun
                time.sleep(generator.uniform(0, 1))
            else:  # more often before it
                time.sleep(generator.uniform(0, start_up))
            os.kill(generator.choice([running.pid, *running.children()]), signal.SIGKILL)
            assert running.wait(30).code in (3, -signal.SIGKILL), f"kill {kill}: {running.text()}"
            steps.append(read_checkpoint(last)["global_step"])
            running, begun = begin(f"--resume {folder}")
        assert running.wait(900).code == 0, running.text()
    finally:
        running.kill()
    assert steps == sorted(steps) and 250 <= steps[-1] < 4000
    expected = train(*LONG.split(), timeout=900)
    found = result(folder)
    for key in ("steps", "epochs", "test", "weights_sha256"):
        assert found[key] == expected[key]
    print(f"{KILLS} kills, the last after {steps[-1]} steps; different steps: {len(set(steps))}")


# --- two hosts


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[list[str]]]:
    """The words that run a command on each of two hosts: network namespaces with a cable between them."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root and the command `ip`")
    names = [f"lit-mnist-{os.getpid()}-{host}" for host in range(2)]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr!r}")
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for host, name in enumerate(names):
            ip("-netns", name, "address", "add", f"10.0.0.{host + 1}/24", "dev", "cable")
            ip("-netns", name, "link", "set", "cable", "up")
            ip("-netns", name, "link", "set", "lo", "up")
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.mark.parametrize("program", [["-m", "lit_mnist.raw_ddp"], [ROOT / "train.py"]], ids=["raw_ddp", "lightning"])
def test_two_hosts_train_the_weights_of_two_ranks(hosts: list[list[str]], tmp_path: Path, program: list[Any]) -> None:
    words = [*program, "--precision", "32-true", "--max-steps", 30, "--data.augment", "affine"]
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    one = ["--standalone", "--nproc-per-node", 2, *words, "--devices", 2, "--run-dir", tmp_path / "one"]
    succeed(*torchrun, *one, **environment)

    def run_on(host: int) -> Completed:
        two = f"--nnodes 2 --node-rank {host} --nproc-per-node 1 --master-addr 10.0.0.1 --master-port 29500".split()
        two += [*words, "--devices", 1, "--trainer.num_nodes", 2, "--run-dir", tmp_path / "two"]
        # Both hosts have the name of this machine, which has no address in their network.
        return run(*hosts[host], *torchrun, *two, GLOO_SOCKET_IFNAME="cable", **environment)

    with ThreadPoolExecutor() as pool:
        for completed in pool.map(run_on, range(2)):
            assert completed.code == 0, completed.output
    found, expected = result(tmp_path / "two"), result(tmp_path / "one")
    assert found["world_size"] == expected["world_size"] == 2
    assert found["weights_sha256"] == expected["weights_sha256"]
    assert found["test"]["confusion"] == expected["test"]["confusion"]


# --- the wheel


def test_the_wheel_trains_outside_the_checkout(tmp_path: Path) -> None:
    copied = copy_checkout(tmp_path / "checkout")
    pip = (sys.executable, "-m", "pip", "--quiet", "--quiet")
    succeed(*pip, "wheel", copied, "--no-deps", "--wheel-dir", tmp_path)
    shutil.rmtree(copied)
    [wheel] = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    succeed(*pip, "install", wheel, "--no-deps", "--target", installed)

    def lit_mnist(*words: object, cwd: Path = tmp_path) -> str:
        return succeed(installed / "bin" / "lit-mnist", *words, cwd=cwd, PYTHONPATH=str(installed))

    lit_mnist("--max-steps", 2, "--devices", 2, "--run-dir", "run")
    assert result(tmp_path / "run")["steps"] == 2
    config = installed / "lit_mnist" / "configs" / "seed.yaml"
    lit_mnist("--config", config, "--max-steps", 2, "--run-dir", "configured")
    assert "mine" in lit_mnist("new", "mine")
    lit_mnist("--config", "config.yaml", "--max-steps", 2, "--run-dir", "run", cwd=tmp_path / "mine")
    assert result(tmp_path / "mine" / "run")["steps"] == 2


# --- other versions

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "torchdata")


def lowest(requirement: str) -> str:
    """Returns the requirement of the lowest release: `torch>=2.11,<3` becomes `torch==2.11.*`."""
    match = re.match(r"([^>]+)>=([\d.]+)", requirement)
    assert match, requirement
    name, version = match.groups()
    return f"{name}=={version if '.' in version else version + '.0'}.*"


VERSIONS = {
    "the lowest versions": (sys.executable, [lowest(requirement) for requirement in PROJECT["dependencies"]]),
    "Python 3.12": ("python3.12", [*PROJECT["dependencies"], "--constraint", ROOT / "constraints.txt"]),
    "Python 3.13, the newest versions": ("python3.13", PROJECT["dependencies"]),
}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", VERSIONS)
def test_the_tests_pass_with_other_versions(case: str, tmp_path: Path) -> None:
    interpreter, requirements = VERSIONS[case]
    if not shutil.which(interpreter) or run(interpreter, "--version").code:
        pytest.skip(f"{interpreter} is not installed")
    environment = tmp_path / "environment"
    python = environment / "bin" / "python"
    try:
        succeed(interpreter, "-m", "venv", environment)
        succeed(python, "-m", "pip", "--quiet", "--quiet", "install", *requirements, *TOOLS, timeout=1800)
        tests = ("tests", "-m", "not nightly", "-p", "no:cacheprovider")
        parallel = ("--numprocesses", "2", "--dist", "worksteal", "--basetemp", tmp_path / "tests")
        # With PYTHONPATH, the processes that tests start import the checkout.
        paths = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        succeed(python, "-m", "pytest", "--quiet", *tests, *parallel, cwd=ROOT, timeout=1800, **paths)
    finally:
        shutil.rmtree(environment, ignore_errors=True)


# --- mistakes


class Mistake(NamedTuple):
    """One changed line, and the quick test that must fail."""

    file: str
    line: str
    changed: str
    test: str


MISTAKES = {
    "all ranks train on one part of a batch": Mistake(
        "order.py",
        "first = batch * batch_size + rank * share",
        "first = batch * batch_size",
        "test_data.py::test_the_samples_of_a_step_depend_on_seed_and_step_alone",
    ),
    "an epoch has the order of the one before": Mistake(
        "order.py",
        'return permutation(seed, "epoch order", count, epoch)',
        'return permutation(seed, "epoch order", count)',
        "test_data.py::test_each_sample_is_used_once_per_epoch_in_a_new_order",
    ),
    "the position in the epoch is lost": Mistake(
        "datamodule.py",
        'self.epoch, self.batches_read = state["epoch"], state["batches_read"]',
        'self.epoch = state["epoch"]',
        "test_exact_checkpoint.py::test_killed_and_resumed",
    ),
    "the generators are not restored": Mistake(
        "plugins/exact_checkpoint.py",
        'set_generator_states(rank["generators"])',
        "pass",
        "test_exact_checkpoint.py::test_killed_and_resumed",
    ),
    "the digest is not verified": Mistake(
        "plugins/checkpoint_io.py",
        "hashlib.sha256(signed).hexdigest().encode() != digest",
        "False",
        "test_checkpoint_io.py::test_damaged_files_are_rejected",
    ),
    "an evaluation is padded": Mistake(
        "plugins/evaluation.py",
        "exact = ExactDistributedSampler(dataset, batches.batch_size, evaluation=True)",
        "exact = BatchSampler(DistributedSampler(dataset, shuffle=False), batches.batch_size, False)",
        "test_evaluation.py::test_each_loader_gives_each_sample_once",
    ),
    "batch norm does not reduce its gradient": Mistake(
        "plugins/sync_batch_norm.py",
        "_wait(dist.all_reduce(sums, async_op=True))",
        "pass",
        "test_numerics.py::test_batch_norm_over_uneven_ranks_is_that_of_the_whole_batch",
    ),
    "a short window is divided by the whole": Mistake(
        "plugins/accumulation.py",
        "self._factor = accumulate / window",
        "self._factor = 1.0",
        "test_numerics.py::test_accumulated_gradients_are_those_of_the_whole_batch",
    ),
    "the schedule does not wait for a skipped step": Mistake(
        "plugins/skipped_steps.py",
        "if made and (batch_idx + 1) % frequency == 0:",
        "if (batch_idx + 1) % frequency == 0:",
        "test_numerics.py::test_an_overflow_in_float16_is_skipped_on_all_ranks_and_the_schedule_waits",
    ),
    "a loss that is not finite is not noticed": Mistake(
        "plugins/finite.py",
        "if math.isfinite(get_total_norm(gradients, math.inf)):",
        "if True:",
        "test_numerics.py::test_a_value_that_is_not_finite_ends_all_ranks_in_its_step",
    ),
    "a signal stops a run without its checkpoint": Mistake(
        "plugins/stop.py",
        "if self._agreed and all(each.save_now(trainer) for each in exact):",
        "if self._agreed:",
        "test_failures.py::test_a_signal_stops_all_ranks_at_one_saved_step",
    ),
    "the rank that was killed is not named": Mistake(
        "launch.py",
        "killed = [rank for rank, code in enumerate(codes) if code is not None and code < 0]",
        "killed = []",
        "test_failures.py::test_a_killed_process_is_named_and_none_is_left",
    ),
}


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout in which the tests of the mistakes pass."""
    folder = copy_checkout(tmp_path_factory.mktemp("mistakes") / "checkout")
    completed = run_tests(folder, *(mistake.test for mistake in MISTAKES.values()))
    assert completed.code == 0, completed.output
    return folder


def run_tests(folder: Path, *tests: str) -> Completed:
    words = (sys.executable, "-m", "pytest", "--quiet", "--exitfirst", "-m", "not nightly", "-p", "no:cacheprovider")
    # With PYTHONPATH, the processes that tests start import the copy, and not the installed checkout.
    environment = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return run(*words, *(f"tests/{test}" for test in tests), cwd=folder, timeout=900, **environment)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(copied: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    mistake = MISTAKES[name]
    path = copied / "lit_mnist" / mistake.file
    source = path.read_text()
    assert source.count(mistake.line) == 1, f"{mistake.file} does not have this line once: {mistake.line}"
    path.write_text(source.replace(mistake.line, mistake.changed))
    begin = time.monotonic()
    try:
        completed = run_tests(copied, mistake.test)
    finally:
        path.write_text(source)
    with capsys.disabled():
        print(f"\n{name:<50} exit code {completed.code} in {time.monotonic() - begin:4.0f} s: {mistake.test}", end=" ")
    assert completed.code == pytest.ExitCode.TESTS_FAILED, completed.output
