"""The private parts of torch that the doctor uses behave as it expects."""

from __future__ import annotations

import gc
import multiprocessing.synchronize
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from ddp_doctor.emulation import torch_internals as emulated
from ddp_doctor.faults.ld007_augmentations_repeat import _chance
from ddp_doctor.probes.draws import Draw, RandomReplay
from ddp_doctor.probes.generators import OwnGenerators
from ddp_doctor.probes.loaders import LoaderProbe
from ddp_doctor.probes.samples import Datasets
from ddp_doctor.records.recorder import Recorder
from ddp_doctor.records.spec import Spec, Target
from ddp_doctor.torch_internals import (
    LoaderIndices,
    graph_nodes,
    ignored_by_ddp,
    in_backward,
    on_indices,
    tree_leaves,
    tree_map,
    watch_indices,
    without_modes,
)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_indices_of_a_loader_are_seen(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    base: Any = torch.utils.data.dataloader._BaseDataLoaderIter
    for name in ("_next_index", "__next__"):
        monkeypatch.setattr(base, name, getattr(base, name))
    watch_indices()
    data = TensorDataset(torch.arange(10))
    loader = DataLoader(data, 3, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    for _ in range(2):
        iterator = iter(loader)
        indices = LoaderIndices(iterator)
        batches = [next(iterator)[0].tolist() for _ in range(2)]
        assert [indices.of_batch(number) for number in range(2)] == batches
        assert indices.drain()
        assert sorted(index for part in indices.lists for index in part) == list(range(10))


@pytest.mark.parametrize("workers", [0, 2])
def test_indices_and_batches_are_told(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    base: Any = torch.utils.data.dataloader._BaseDataLoaderIter
    for name in ("_next_index", "__next__"):
        monkeypatch.setattr(base, name, getattr(base, name))
    taken: list[int] = []
    given: list[Any] = []
    on_indices(lambda _, indices: taken.extend(indices), given.append)
    loader = DataLoader(TensorDataset(torch.arange(10)), 3, shuffle=True, num_workers=workers)
    assert [value for (batch,) in loader for value in batch.tolist()] == taken
    assert len(given) == 4


def test_a_stream_has_no_indices() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(4))

    indices = LoaderIndices(iter(DataLoader(Stream())))
    assert indices.is_iterable
    assert not indices.drain()


def test_a_dispatch_mode_is_left_for_a_while() -> None:
    tape = RandomReplay()
    tape.recording = True
    with tape:
        torch.rand(2)
        with without_modes():
            torch.rand(2)
    assert len(tape.draws) == 1


@pytest.mark.parametrize(("dropout", "draws"), [(0.0, 0), (0.5, 1)])
def test_attention_without_dropout_draws_nothing(dropout: float, draws: int) -> None:
    tape, queries = RandomReplay(), torch.rand(1, 2, 4, 8)
    tape.recording = True
    with tape:
        nn.functional.scaled_dot_product_attention(queries, queries, queries, dropout_p=dropout)
    assert min(len(tape.draws), 1) == draws


def test_the_nodes_of_a_kept_graph_are_counted() -> None:
    weight = nn.Parameter(torch.ones(2))
    before = graph_nodes()
    kept = (weight * 2).sum()
    assert graph_nodes() > before
    del kept
    assert graph_nodes() == before


def test_a_backward_pass_is_seen() -> None:
    weight, seen = nn.Parameter(torch.ones(2)), []
    weight.register_hook(lambda gradient: seen.append(in_backward()))
    (weight * 2).sum().backward()
    assert (seen, in_backward()) == ([True], False)


def test_nested_batches_are_flattened() -> None:
    batch = {"x": torch.ones(2), "rest": [torch.zeros(2), "text"]}
    assert len(tree_leaves(batch)) == 3
    assert tree_map(lambda leaf: leaf + 1, batch)["rest"][0].tolist() == [1, 1]


def test_the_draws_of_two_ranks_replace_those_of_one_process() -> None:
    drop = nn.Dropout(0.5)
    inputs = [torch.rand(3, 4) for _ in range(2)]
    tapes, outputs = [], []
    for part in inputs:
        tape = RandomReplay()
        tape.recording = True
        with tape:
            outputs.append(drop(part) + torch.randn(3, 4))
        tapes.append([Draw(draw.name, draw.outputs) for draw in tape.draws])
    whole = RandomReplay()
    whole.replay(tapes)
    with whole:
        joined = drop(torch.cat(inputs)) + torch.randn(6, 4)
    assert not whole.failures
    torch.testing.assert_close(joined, torch.cat(outputs), rtol=0, atol=0)


def test_a_number_per_batch_cannot_be_joined() -> None:
    tapes = []
    for _ in range(2):
        tape = RandomReplay()
        tape.recording = True
        with tape:
            torch.rand(())
        tapes.append(tape.draws)
    whole = RandomReplay()
    whole.replay(tapes)
    with whole:
        torch.rand(())
    assert "not part of" in whole.failures[0]


def test_the_factories_of_torch_are_known() -> None:
    found = emulated.factories()
    assert {"zeros", "tensor", "arange", "randn", "randint", "randperm", "zeros_like", "randn_like"} <= {*found}
    assert len(found) >= 35


def test_an_optimized_module_calls_its_module() -> None:
    model = nn.Linear(2, 1)
    compiled = emulated.optimized_module(model)
    assert torch.equal(compiled(torch.ones(1, 2)), model(torch.ones(1, 2)))
    assert [*compiled.state_dict()] == ["_orig_mod.weight", "_orig_mod.bias"]


def test_each_use_of_cuda_initializes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []

    def fail() -> None:
        used.append(1)
        raise RuntimeError("no GPU")

    monkeypatch.setattr(torch.cuda, "_lazy_init", emulated.lazy_init())
    emulated.replace_lazy_init(fail)
    for use in (
        lambda: torch.zeros(1).cuda(),
        lambda: torch.zeros(1, device="cuda"),
        lambda: nn.Linear(1, 1).to("cuda"),
    ):
        with pytest.raises(RuntimeError, match="no GPU"):
            use()
    assert len(used) == 3


def test_a_default_device_is_known() -> None:
    with torch.device("meta"):
        contexts = emulated.function_modes()
        assert isinstance(contexts[-1], emulated.DeviceContext)
        assert contexts[-1].device == torch.device("meta")


def test_batches_are_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulated.pinning, "pin_memory", emulated.pinning.pin_memory)
    emulated.pin_nothing()
    batch = [torch.ones(2)]
    assert emulated.pinning.pin_memory(batch, "cuda") is batch


def test_a_tensor_that_wraps_another_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "_make_wrapper_subclass", torch.Tensor._make_wrapper_subclass)
    emulated.make_wrappers_in_memory(lambda device: torch.device("cpu"))

    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

    made = torch.Tensor._make_wrapper_subclass(Wrapper, (2,), device=torch.device("cuda", 1))
    assert made.device == torch.device("cpu")


def test_the_ranks_of_a_program_with_many_epochs_end_with_the_same_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = Spec(Target("mine:main"), world_size=2)
    ranks = [LoaderProbe(Recorder(tmp_path), spec, None, lambda: None, lambda: None) for _ in range(2)]
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    ended = []
    for epoch in range(1, 6):
        now += 15.0
        for rank in ranks:
            rank.training_epochs = epoch
        ended += [(epoch, number) for number, rank in enumerate(ranks) if rank.is_last(trains=True)]
    assert ended == [(5, 0), (5, 1)]
    assert not ranks[0].is_last(trains=False)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_temporary_name_is_drawn_by_no_program(frozen: bool) -> None:
    with tempfile.NamedTemporaryFile():
        multiprocessing.Lock()
    if frozen:
        # As in a process that forks the runs.
        gc.freeze()
    # A fork draws its names from new generators.
    for sequence in (tempfile._name_sequence, multiprocessing.synchronize.SemLock._rand):
        vars(sequence).pop("_rng_pid")
    own, mine = OwnGenerators(), random.Random(1)
    try:
        with tempfile.NamedTemporaryFile():
            multiprocessing.Lock()
            own.find()
        before = own.digests()
        with tempfile.NamedTemporaryFile():
            multiprocessing.Lock()
            assert own.digests() == before
    finally:
        gc.unfreeze()
    assert any(generator is mine for generator in own.known)


def test_what_ddp_ignores_is_known() -> None:
    module = torch.nn.ModuleDict({"shared": torch.nn.Linear(2, 2), "expert": torch.nn.Linear(2, 2)})
    assert ignored_by_ddp(module) == []
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["expert.weight", "expert.bias"])
    assert ignored_by_ddp(module) == ["expert.bias", "expert.weight"]


class _Rotated(Dataset[torch.Tensor]):
    """Each sample is rotated by one of four angles."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rot90(torch.arange(4).view(2, 2) + index, int(torch.randint(4, ())))


def test_how_often_an_augmentation_differs_is_measured_with_independent_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine would measure fewer samples.
    monkeypatch.setattr("ddp_doctor.probes.samples._MOST_SECONDS", 60.0)
    recorder = Recorder(tmp_path)
    datasets = Datasets(recorder, Spec(Target(command=("x",))))
    datasets.number(_Rotated())
    datasets.call()
    (event,) = [event for event in recorder.events if event["kind"] == "calls"]
    assert 0.5 < event["random"] < 0.95
    # Two samples are easily rotated twice by the same angle, and twenty are not.
    assert _chance(event) ** 2 > 1e-2
    assert _chance(event) ** 20 < 1e-4
