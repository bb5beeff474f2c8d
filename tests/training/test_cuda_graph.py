"""Passes recorded as a CUDA graph: where they are, and that the weights are bit-identical. A CPU stands in for the GPU.

The stand-in does what a graph does: it notes the operations of the recording, and repeats them on the same memory.
`tests/engines/test_gpu.py` does it with real graphs where there is a GPU.
"""

from __future__ import annotations

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
    *("--lr", 0.05, "--run.threads", 1, "--data.augment", "affine"),
)


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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.graph.operations.append((func, args, kwargs or {}, made))
        return made


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def graph(made: Graph, **_: Any) -> Iterator[None]:
        # A recording computes nothing: what it changes is as before, and comes with the first replay.
        with torch.no_grad():
            kept = [(buffer, buffer.clone()) for buffer in buffers]
        with Recording(made):
            yield
        for buffer, before in kept:
            buffer.copy_(before)

    buffers: list[torch.Tensor] = []
    original = torch.nn.BatchNorm2d.__init__

    def noted(self: torch.nn.BatchNorm2d, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        buffers.extend(self.buffers())

    monkeypatch.setattr(torch.nn.BatchNorm2d, "__init__", noted)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr("lit_mnist.cli.experiment_target.uses_cuda_graph", lambda *_: True)


@pytest.mark.parametrize(
    ("precision", "engine"),
    [
        *(("32-true", engine) for engine in ("single", "lightning")),
        *(("bf16-mixed", engine) for engine in ("single", "lightning")),
        pytest.param("16-mixed", "single", marks=pytest.mark.slow),
        ("16-mixed", "lightning"),
    ],
)
def test_a_recorded_graph_trains_the_same_bits(
    program: Program, request: pytest.FixtureRequest, engine: str, precision: str
) -> None:
    queued = result_of(program.train(*WORDS, "--precision", precision, engine=engine))
    request.getfixturevalue("graphs")
    recorded = result_of(program.train(*WORDS, "--precision", precision, engine=engine))
    assert (queued["cuda_graph"], recorded["cuda_graph"]) == (False, True)
    for key in ("weights_sha256", "steps", "skipped_steps", "validation", "test"):
        assert recorded[key] == queued[key], key
    assert recorded["train"]["loss"] == queued["train"]["loss"]


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
