"""Within an epoch no step waits for the device: seen without a GPU.

Tensors on the device `meta` have no numbers, so that whoever reads one fails; and on a CPU two of torch's modes see
every read. A CPU's own habit of looking at each gradient at once is put off for it, as a GPU does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Program
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_mnist.data.dataset import Dataset
from lit_mnist.data.loader import EvaluationBatches, TrainBatches
from lit_mnist.distributed.consensus import Consensus
from lit_mnist.distributed.devices import Devices
from lit_mnist.distributed.rng import RandomKey
from lit_mnist.experiment import Experiment, ModelSettings
from lit_mnist.models.build import build_net
from lit_mnist.profiling.timing import WARM_UP_STEPS, StepClock
from lit_mnist.run import finite
from lit_mnist.run.finite import FiniteCheck
from lit_mnist.run.monitor import StepMonitor
from lit_mnist.training.classifier import TrainMetrics
from lit_mnist.training.job import Splits, plan_for, split_dataset
from lit_mnist.training.optimizer import make_optimizer
from lit_mnist.training.recorder import MetricsRecorder

META = torch.device("meta")
STEPS = 30
OTHERS = ("fabric", "with_accelerate", "with_hf_trainer", "parameter_server")
WORDS: tuple[object, ...] = (
    *("--data.val_size", 0, "--data.test_size", 12, "--batch-size", 12, "--data.train_size", 12 * STEPS),
    *("--epochs", 1, "--lr", 0.05, "--run.threads", 1, "--data.augment", "affine"),
    # What replaces torch's own on CPUs tells the ranks' counts by numbers.
    *("--trainer.sync_batchnorm", "false"),
)


class Crossings(TorchDispatchMode):
    """Notes each operation in which tensors of the host and of the device meet."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, made)) if isinstance(leaf, torch.Tensor)]
        if len({tensor.device.type for tensor in tensors}) > 1:
            self.found.append(str(func))
        return made


READS = {"item", "tolist", "cpu", "numpy", "nonzero", "equal", "is_nonzero", "masked_select", "bincount", "unique"}
READS |= {"__bool__", "__float__", "__int__", "__index__", "__array__"}


class PythonReads(TorchFunctionMode):
    """Notes each call by which Python takes a number from a tensor, also where a tensor on a CPU just has it."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in READS:
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


class OperatorReads(TorchDispatchMode):
    """Notes each operation whose result's size depends on numbers, wherever it is called."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            isinstance(leaf, torch.Tensor) and leaf.dtype in {torch.bool, torch.uint8} for leaf in tree_leaves(args[1:])
        )
        if name in READS or by_mask:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def splits(embedded: Dataset) -> Splits:
    return split_dataset(Experiment().replace("data", train_size=240, val_size=50, test_size=101), embedded)


@pytest.mark.parametrize("augment", ["none", "shift", "affine"])
def test_whole_batches_are_made_on_the_device_without_a_copy_of_their_own(splits: Splits, augment: str) -> None:
    experiment = Experiment().replace("data", batch_size=24, augment=augment).replace("trainer", max_epochs=2)
    plan = plan_for(experiment, splits, world_size=2)
    for epoch, first in ((0, 0), (1, 3)):
        loader = TrainBatches(
            splits.train, plan=plan, settings=experiment.data, seed=1, epoch=epoch, rank=1, first=first, device=META
        )
        with Crossings() as crossings:
            batches = iter(loader)
            made = [next(batches)]
            # The samples, their random numbers, and this rank's rows of a mask; the data set once for all epochs.
            assert len(crossings.found) == (5 if epoch == 0 else 3)
            assert set(crossings.found) == {"aten._to_copy.default"}
            crossings.found.clear()
            made += batches
        assert not crossings.found
        assert len(made) == 10 - first
        for batch in made:
            assert batch.images.shape == (12, 1, 28, 28)
            assert isinstance(batch.rng, RandomKey)
            assert {part.device for part in (batch.images, batch.targets, batch.rng.rows)} == {META}
            assert batch.indices.device.type == "cpu"
            assert batch.to(META) is batch
    with Crossings() as crossings:
        for batch in EvaluationBatches(splits.train, rank=0, world_size=1, batch_size=100, device=META):
            assert batch.to(META) is batch
    assert not crossings.found


def test_a_batch_of_the_host_s_is_moved_as_a_whole_but_for_its_numbers(splits: Splits) -> None:
    experiment = Experiment().replace("data", batch_size=24, pipeline="per_sample")
    plan = plan_for(experiment, splits, world_size=1)
    batch = next(iter(TrainBatches(splits.train, plan=plan, settings=experiment.data, seed=1, epoch=0, rank=0)))
    assert batch.to(torch.device("cpu")) is batch
    found = batch.to(META)
    assert found.rng
    assert {part.device for part in (found.images, found.targets, found.rng.rows)} == {META}
    assert found.indices is batch.indices


class FinishedError(Exception):
    """What ends the training on a device without numbers."""


def test_an_epoch_is_trained_on_a_device_that_has_no_numbers(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever reads one raises; but for the figures and the look at the gradients, which have their own steps."""
    on_step_end, crossings = MetricsRecorder.on_step_end, Crossings()

    def watched(self: MetricsRecorder, *arguments: Any) -> None:
        on_step_end(self, *arguments)
        if self.step == 1:
            crossings.__enter__()

    def finish(self: MetricsRecorder, *_: Any, **__: Any) -> None:
        raise FinishedError(f"{self.step} steps, {crossings.found} crossed over")

    monkeypatch.setattr(Devices, "of", lambda *_: META)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: torch.enable_grad())
    metrics = {"train_loss": 0.0, "train_accuracy": 0.0}
    monkeypatch.setattr(TrainMetrics, "compute", lambda *_: metrics)
    monkeypatch.setattr(FiniteCheck, "check", lambda *_: None)
    monkeypatch.setattr(MetricsRecorder, "on_step_end", watched)
    monkeypatch.setattr(MetricsRecorder, "on_epoch_end", finish)
    words = ("--precision", "32-true", "--trainer.gradient_clip_val", 1.0, "--model.momentum", 0.9)
    done = program(*WORDS, *words, engine="single")
    assert f"FinishedError: {STEPS} steps, [] crossed over" in done.err, done.err


def watch_reads(monkeypatch: pytest.MonkeyPatch, notes: Path) -> None:
    """Lets rank 0 write down what was read after each step but the first, whose figures are shown, and the last."""
    found: list[str] = []
    modes = (PythonReads(found), OperatorReads(found))
    end_step, decide = StepMonitor.end_step, Consensus.decide
    steps: list[list[str]] = []

    def watched(self: StepMonitor, *arguments: Any) -> None:
        end_step(self, *arguments)
        steps.append(found.copy())
        found.clear()
        if self.step == 1:
            for mode in modes:
                mode.__enter__()
        if self.step == STEPS - 1:
            for mode in reversed(modes):
                mode.__exit__(None, None, None)
            if self.rank.is_first:
                notes.write_text(json.dumps(steps[1:]))

    def agreed(self: Consensus, *arguments: Any, **options: Any) -> Any:
        before = len(found)
        try:
            return decide(self, *arguments, **options)
        finally:
            # It has a clock of its own, not the step.
            del found[before:]

    monkeypatch.setattr(StepMonitor, "end_step", watched)
    monkeypatch.setattr(Consensus, "decide", agreed)


@pytest.fixture
def reads_of(program: Program, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
    """What trains, and returns the reads of each step between two figures."""
    notes = program.folder / "notes.json"
    watch_reads(monkeypatch, notes)

    def train(engine: str, devices: int, precision: str) -> list[list[str]]:
        words = ("--devices", devices, "--precision", precision, "--trainer.gradient_clip_val", 1.0)
        done = program("fit", *WORDS, *words, "--run-dir", program.folder / "run", engine=engine)
        assert done.code == 0, done.out + done.err
        found: list[list[str]] = json.loads(notes.read_text())
        assert len(found) == STEPS - 2
        return found

    return train


@pytest.mark.parametrize(
    ("engine", "devices"),
    [
        ("single", 1),
        pytest.param("raw_ddp", 2, marks=pytest.mark.slow),
        ("lightning", 2),
        pytest.param("lightning", 1, marks=pytest.mark.slow),
        *(pytest.param(engine, 2, marks=pytest.mark.slow) for engine in OTHERS),
    ],
)
def test_no_step_reads_a_number_between_two_figures(
    reads_of: Callable[..., list[list[str]]], monkeypatch: pytest.MonkeyPatch, engine: str, devices: int
) -> None:
    monkeypatch.setattr(finite, "SYNCHRONOUS_DEVICES", frozenset())
    assert not any(reads_of(engine, devices, "bf16-mixed"))


@pytest.mark.parametrize(("engine", "devices"), [("single", 1), pytest.param("lightning", 2, marks=pytest.mark.slow)])
def test_in_float16_the_scaler_alone_reads_whether_a_gradient_overflowed(
    reads_of: Callable[..., list[list[str]]], monkeypatch: pytest.MonkeyPatch, engine: str, devices: int
) -> None:
    monkeypatch.setattr(finite, "SYNCHRONOUS_DEVICES", frozenset())
    assert all(step == ["item"] for step in reads_of(engine, devices, "16-mixed"))


def test_a_cpu_looks_at_each_gradient_at_once(reads_of: Callable[..., list[list[str]]]) -> None:
    """And so it is seen that a read is seen."""
    assert all(step == ["tolist"] for step in reads_of("single", 1, "32-true"))


def test_steps_that_are_only_queued_share_the_time_until_the_device_has_computed_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    clock = StepClock(first_process=1)

    def steps(count: int, seconds: float) -> None:
        """Steps that take no time to queue, and then a wait for the device."""
        for number in range(count):
            now[0] += seconds if number + 1 == count else 0.0
            clock.on_step_end(waited=number + 1 == count)

    steps(1, 5.0)
    steps(WARM_UP_STEPS, 100.0)
    for seconds in (1.0, 2.0, 3.0):
        steps(4, 4 * seconds)
    assert clock.steps_per_s() == 1 / 2.0
    assert clock.recent_steps_per_s(steps=8) == 8 / 20
    # A pause belongs to no step, nor does what was queued before it.
    clock.on_step_end(waited=False)
    clock.pause()
    now[0] += 1000
    steps(1, 0.0)
    steps(2, 2 * 9.0)
    assert clock.recent_steps_per_s(steps=2) == 1 / 9.0


@pytest.mark.parametrize(
    "settings",
    [
        ModelSettings(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        ModelSettings(lr=0.1, momentum=0.0, nesterov=False),
        ModelSettings(optimizer="adam", lr=0.01),
        ModelSettings(optimizer="adamw", lr=0.01, weight_decay=0.1),
    ],
    ids=["sgd", "plain sgd", "adam", "adamw"],
)
def test_one_kernel_for_all_parameters_computes_the_bits_of_one_for_each(settings: ModelSettings) -> None:
    net = build_net(settings, num_classes=10, seed=1)
    other = build_net(settings, num_classes=10, seed=1)
    for_all, for_each = make_optimizer(net, settings), make_optimizer(other, settings)
    assert for_all.param_groups[0]["foreach"]
    for_each.param_groups[0]["foreach"] = False
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        for one, another in zip(net.parameters(), other.parameters(), strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            another.grad = one.grad.clone()
        for_all.step()
        for_each.step()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))
