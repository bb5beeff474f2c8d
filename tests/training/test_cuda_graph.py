"""Passes recorded as a CUDA graph: where they are, and that the weights are bit-identical. A CPU stands in for the GPU.

The stand-in does what a graph does: it notes the operations of the recording, and repeats them on the same memory.
`tests/engines/test_gpu.py` does it with real graphs where there is a GPU.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import Program, result_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_mnist.distributed.devices import Devices
from lit_mnist.engines.device_checks import uses_cuda_graph
from lit_mnist.errors import InputError
from lit_mnist.experiment import Experiment

WORDS: tuple[object, ...] = (
    *("--data.val_size", 24, "--data.test_size", 24, "--batch-size", 12, "--data.train_size", 120, "--epochs", 2),
    *("--run.threads", 1, "--data.augment", "affine"),
)
LR: tuple[object, ...] = ("--lr", 0.05)


class Graph:
    """Stands in for torch.cuda.CUDAGraph."""

    made = 0

    def __init__(self) -> None:
        Graph.made += 1
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def replay(self) -> None:
        with torch.no_grad():
            for operation, args, kwargs, made in self.operations:
                again = operation(*args, **kwargs)
                for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old is not new:
                        old.copy_(new)


class Recording(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        # The tensors that an operation has changed, and their values before; by identity, as tensors compare by value.
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            for tensor in tree_leaves((args, kwargs or {})):
                if isinstance(tensor, torch.Tensor):
                    self.before.setdefault(id(tensor), (tensor, tensor.clone()))
        made = func(*args, **(kwargs or {}))
        self.graph.operations.append((func, args, kwargs or {}, made))
        return made


def sgd(parameters: Any, gradients: Any, buffers: Any, *, lr: Any, found_inf: Any, **options: Any) -> None:
    """Stands in for the fused kernel, whose form for CPUs rounds the last elements of a tensor differently."""
    made = torch.ones(()) if found_inf is None else 1 - found_inf
    for parameter, gradient, buffer in zip(parameters, gradients, buffers, strict=True):
        change = gradient.add(parameter, alpha=options["weight_decay"])
        if buffer is not None:
            momentum = buffer.mul(options["momentum"]).add_(change)
            change = change.add(momentum, alpha=options["momentum"]) if options["nesterov"] else momentum
            buffer.copy_(torch.where(made > 0, momentum, buffer))
        # In float64, the product is exact.
        updated = (parameter.double() - lr.double() * change.double()).float()
        parameter.copy_(torch.where(made > 0, updated, parameter))


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def graph(made: Graph, **_: Any) -> Iterator[None]:
        # A recording computes nothing: what it changes is as before, and comes with the first replay.
        before = [(buffer, buffer.clone()) for each in norms for buffer in each.buffers()]
        with Recording(made) as recording:
            yield
        with torch.no_grad():
            for tensor, value in reversed([*before, *recording.before.values()]):
                tensor.copy_(value)

    # The schema of batch norm does not say that it changes its buffers.
    norms: list[torch.nn.BatchNorm2d] = []
    original = torch.nn.BatchNorm2d.__init__

    def noted(self: torch.nn.BatchNorm2d, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        norms.append(self)

    monkeypatch.setattr(torch.nn.BatchNorm2d, "__init__", noted)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr("lit_mnist.training.cuda_graph.sgd", sgd)
    monkeypatch.setattr("lit_mnist.cli.experiment_target.uses_cuda_graph", lambda *_: True)


@pytest.mark.parametrize(
    ("precision", "engine"),
    [
        *(pytest.param("32-true", engine, marks=pytest.mark.slow) for engine in ("single", "lightning")),
        ("bf16-mixed", "single"),
        pytest.param("bf16-mixed", "lightning", marks=pytest.mark.slow),
        pytest.param("16-mixed", "single", marks=pytest.mark.slow),
        pytest.param("16-mixed", "lightning", marks=pytest.mark.slow),
    ],
)
def test_a_recorded_graph_trains_the_same_bits(
    program: Program, request: pytest.FixtureRequest, engine: str, precision: str
) -> None:
    queued = result_of(program.train(*WORDS, *LR, "--precision", precision, engine=engine))
    request.getfixturevalue("graphs")
    recorded = result_of(program.train(*WORDS, *LR, "--precision", precision, engine=engine))
    assert (queued["cuda_graph"], recorded["cuda_graph"]) == (False, True)
    for key in ("weights_sha256", "steps", "skipped_steps", "validation", "test"):
        assert recorded[key] == queued[key], key
    assert recorded["train"]["loss"] == queued["train"]["loss"]


@pytest.mark.parametrize("engine", ["single", pytest.param("lightning", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options",
    [
        ("--precision", "16-mixed", "--model.weight_decay", 0.01, "--trainer.gradient_clip_val", 0.5),
        pytest.param(
            ("--precision", "32-true", "--model.momentum", 0, "--model.nesterov", "false"), marks=pytest.mark.slow
        ),
        ("--precision", "32-true", "--model.nesterov", "false", "--model.schedule", "cosine", "--model.warmup", 0.2),
        ("--precision", "32-true", "--model.optimizer", "adamw", "--lr", 0.001),
        pytest.param(("--precision", "64-true"), marks=pytest.mark.slow),
    ],
    ids=["scaler", "no-momentum", "cosine", "adamw", "float64"],
)
def test_a_recorded_update_trains_the_same_bits(
    program: Program,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    options: tuple[Any, ...],
) -> None:
    """With a scale that doubles so often that the gradient overflows again and again, also within the graph."""
    original = torch.amp.grad_scaler.GradScaler.__init__
    scale = {"init_scale": 2.0**20, "growth_interval": 2}
    monkeypatch.setattr(
        torch.amp.grad_scaler.GradScaler,
        "__init__",
        lambda self, *args, **kwargs: original(self, *args, **{**kwargs, **scale}),
    )
    words = (*WORDS, "--trainer.log_every_n_steps", 7, *(() if "--lr" in options else LR), *options)
    queued = program.train(*words, engine=engine)
    request.getfixturevalue("graphs")
    recorded = program.train(*words, engine=engine)
    found, expected = result_of(recorded), result_of(queued)
    for key in ("weights_sha256", "steps", "skipped_steps", "validation", "test"):
        assert found[key] == expected[key], key
    assert (found["skipped_steps"] > 3) == ("16-mixed" in options)
    logged, before = (list(csv.DictReader((each / "metrics.csv").open())) for each in (recorded, queued))
    for row in (*logged, *before):
        row.pop("images_per_s")
    assert logged == before
    saved, kept = (torch.load(each / "checkpoints" / "last.ckpt", weights_only=True) for each in (recorded, queued))
    for key in ("lr_schedulers", "steps_made", "global_step"):
        assert saved[key] == kept[key], key


GPU = Devices("cuda", (0,))
DEFAULT = Experiment()


@pytest.mark.parametrize("engine", ["single", "lightning"])
def test_one_gpu_records_the_convnet_by_itself(engine: str) -> None:
    assert uses_cuda_graph(engine, DEFAULT, GPU, 1, ())
    assert not uses_cuda_graph(engine, DEFAULT.replace("run", cuda_graph=False), GPU, 1, ())
    assert not uses_cuda_graph(engine, DEFAULT, Devices("cpu", (0,)), 1, ())


@pytest.mark.parametrize(
    ("section", "setting", "told"),
    [
        ("model", {"net": "basicnet"}, "basicnet"),
        ("trainer", {"accumulate_grad_batches": 2}, "trainer.accumulate_grad_batches"),
        ("run", {"trace": "times"}, "run.trace is times"),
        ("run", {"inject": "nan:rank=0,step=3"}, "run.inject"),
    ],
)
def test_what_no_graph_shows_is_not_recorded(section: str, setting: dict[str, Any], told: str) -> None:
    experiment = DEFAULT.replace(section, **setting)
    assert not uses_cuda_graph("single", experiment, GPU, 1, ())
    asked = replace(experiment, run=replace(experiment.run, cuda_graph=True))
    with pytest.raises(InputError, match=told):
        uses_cuda_graph("single", asked, GPU, 1, ())


def test_a_graph_that_cannot_be_is_refused() -> None:
    asked = DEFAULT.replace("run", cuda_graph=True)
    for engine, devices, world_size, extras, told in (
        ("raw_ddp", GPU, 1, (), "the engine raw_ddp records none"),
        ("single", Devices("cpu", (0,)), 1, (), "on cpu"),
        ("lightning", Devices("cuda", (0, 1)), 2, (), "2 ranks"),
        ("lightning", GPU, 1, ("callbacks",), "trainer.callbacks"),
    ):
        with pytest.raises(InputError, match=told):
            uses_cuda_graph(engine, asked, devices, world_size, extras)
