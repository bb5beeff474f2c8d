"""Which devices a configuration means (GPUs are pretended, since the machine may have none), and a rank's memory."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import run_forked

from lit_mnist.errors import InputError
from lit_mnist.experiment import TrainerSettings
from lit_mnist.flags import read_command_line
from lit_mnist.ranks import Rank, choose_devices, keep_memory, threads_per_rank


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda count: monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("present", "devices", "kind", "numbers"),
    [
        (0, "auto", "cpu", (0,)),
        (0, 3, "cpu", (0, 1, 2)),
        (2, "auto", "cuda", (0, 1)),
        (4, 2, "cuda", (0, 1)),
        (4, [3, 1], "cuda", (3, 1)),
    ],
)
def test_devices(
    gpus: Callable[[int], None], present: int, devices: object, kind: str, numbers: tuple[int, ...]
) -> None:
    gpus(present)
    found = choose_devices(TrainerSettings(devices=devices))  # type: ignore[arg-type]
    assert (found.kind, found.numbers) == (kind, numbers)
    device = found.of(Rank(0, found.count, 0, found.count))
    assert device == torch.device("cpu" if kind == "cpu" else f"cuda:{numbers[0]}")


@pytest.mark.parametrize(("devices", "culprit"), [(3, "3 GPUs"), ([0, 2], "GPU 2")])
def test_more_gpus_than_there_are_are_refused(gpus: Callable[[int], None], devices: object, culprit: str) -> None:
    gpus(2)
    with pytest.raises(InputError, match=f"{culprit}, but this machine has 2"):
        choose_devices(TrainerSettings(devices=devices))  # type: ignore[arg-type]


def test_a_gpu_where_there_is_none_is_refused(gpus: Callable[[int], None]) -> None:
    gpus(0)
    with pytest.raises(InputError, match="has no GPU"):
        choose_devices(TrainerSettings(accelerator="gpu"))


def test_a_cpu_may_be_asked_for_beside_gpus(gpus: Callable[[int], None]) -> None:
    gpus(2)
    assert choose_devices(TrainerSettings(accelerator="cpu", devices=5)).kind == "cpu"


@pytest.mark.parametrize("words", [["--devices", "0,2"], ["--devices=0,2"], ["--trainer.devices", "[0,2]"]])
def test_a_list_of_devices_may_be_given_as_the_trainer_takes_it(words: list[str]) -> None:
    assert read_command_line(words).arguments == ["--trainer.devices=[0,2]"]


def test_threads_are_the_cores_divided_by_the_ranks() -> None:
    cores = threads_per_rank(None, 1)
    assert cores >= 1
    assert threads_per_rank(None, cores * 4) == 1
    assert threads_per_rank(3, 2) == 3


def test_memory_that_a_step_has_freed_is_there_for_the_next(tmp_path: Path) -> None:
    """Without it the kernel clears the pages of 20 MB for each new tensor."""

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(5_000_000)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    def work() -> int:
        torch.set_num_threads(1)
        before = [faults() for _ in range(5)]
        keep_memory()
        after = [faults() for _ in range(5)]
        print(before, after)
        return int(min(before) < 1000 or min(after) > 100)

    done = run_forked(work, tmp_path)
    assert done.code == 0, done.out + done.err
