"""Which devices a configuration means (GPUs are pretended, since the machine may have none), and a rank's memory."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

import pytest
import torch
from conftest import child

from lit_mnist.cli.request import parse
from lit_mnist.distributed.devices import choose_devices
from lit_mnist.distributed.rank import Rank, threads_per_rank
from lit_mnist.errors import InputError
from lit_mnist.run.trainer_settings import TrainerSettings


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
def test_too_many_gpus_are_rejected(gpus: Callable[[int], None], devices: object, culprit: str) -> None:
    gpus(2)
    with pytest.raises(InputError, match=f"{culprit}, but this machine has 2"):
        choose_devices(TrainerSettings(devices=devices))  # type: ignore[arg-type]


def test_a_gpu_is_rejected_on_a_machine_without_gpus(gpus: Callable[[int], None]) -> None:
    gpus(0)
    with pytest.raises(InputError, match="has no GPU"):
        choose_devices(TrainerSettings(accelerator="gpu"))


def test_the_cpu_can_be_selected_on_a_machine_with_gpus(gpus: Callable[[int], None]) -> None:
    gpus(2)
    assert choose_devices(TrainerSettings(accelerator="cpu", devices=5)).kind == "cpu"


@pytest.mark.parametrize("words", [["--devices", "0,2"], ["--devices=0,2"], ["--trainer.devices", "[0,2]"]])
def test_devices_can_be_given_as_a_list(words: list[str]) -> None:
    assert parse(words).settings == {"trainer.devices": [0, 2]}


def test_threads_are_the_cores_divided_by_the_ranks() -> None:
    cores = threads_per_rank(None, 1)
    assert cores >= 1
    assert threads_per_rank(None, cores * 4) == 1
    assert threads_per_rank(3, 2) == 3


@pytest.mark.parametrize("is_set", [False, True], ids=["unset", "set by the user"])
def test_the_next_step_reuses_freed_memory(is_set: bool) -> None:
    """Otherwise the kernel clears about two thousand pages in each step of 128 images."""
    script = """
        import json, resource
        import torch
        import torch.nn.functional as F
        from lit_mnist.experiment import ModelSettings
        from lit_mnist.models.build import build_net
        from lit_mnist.distributed.rank import keep_memory

        torch.set_num_threads(1)
        net = build_net(ModelSettings(), num_classes=10, seed=1)
        images, targets = torch.randn(128, 1, 28, 28), torch.randint(0, 10, (128,))

        def faults():
            for step in range(15):
                if step == 5:
                    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
                F.cross_entropy(net(images), targets).backward()
                net.zero_grad()
            return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10

        without = faults()
        keep_memory()
        print(json.dumps({"without": without, "kept": faults()}))
    """
    # malloc's default, which the user has chosen.
    chosen = {"MALLOC_TRIM_THRESHOLD_": str(1 << 17)} if is_set else {}
    found = child(textwrap.dedent(script), **chosen)
    assert (2 * found["kept"] < found["without"]) != is_set, found


def test_no_call_of_a_rank_maps_memory_for_its_frame() -> None:
    """Otherwise each call at some depth of the stack maps a chunk of frames, and its return unmaps it."""
    script = """
        import json, resource
        from lit_mnist.distributed.rank import call_with_deep_stack

        def call(a=0, b=0, c=0, d=0, e=0, f=0, g=0, h=0, i=0, j=0, k=0, l=0, m=0, n=0, o=0, p=0):
            "Its frame is larger than those below, so that it is the one that does not fit at some depth."

        def faults(depth):
            if depth:
                return faults(depth - 1)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _ in range(1000):
                call()
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

        def most():
            return max(faults(depth) for depth in range(300))

        print(json.dumps({"without": most(), "deep": call_with_deep_stack(most)}))
    """
    found = child(textwrap.dedent(script))
    assert found["deep"] < 100, found
    assert found["without"] >= 1000, found
