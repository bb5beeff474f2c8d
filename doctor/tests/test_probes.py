"""What the probes record of real calls of torch and of the standard library, and what they leave out."""

from __future__ import annotations

import argparse
import builtins
import csv
import gc
import io
import json
import logging
import multiprocessing.synchronize
import random
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from doctor_support import on_ranks
from recorded import SPEC
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ddp_doctor.probes.alone import AloneProbe
from ddp_doctor.probes.branches import operands_of_file, values_of
from ddp_doctor.probes.draws import Draw, DrawFlow, RandomReplay
from ddp_doctor.probes.generators import OwnGenerators, drawn, states_of_global, values_drawn
from ddp_doctor.probes.loaders import LoaderProbe
from ddp_doctor.probes.modules import synchronize
from ddp_doctor.probes.options import OPTIONS, OptionProbe
from ddp_doctor.probes.reports import ReportProbe
from ddp_doctor.probes.written_files import is_cached
from ddp_doctor.records.recorder import Recorder
from ddp_doctor.torch_internals import LoaderIndices, graph_nodes, in_backward, on_indices, watch_indices

# Random numbers.

X, ROWS = torch.ones(2, 8, 16), torch.rand(8, 4)
ENCODER, DECODER, TIMES = nn.Linear(4, 6), nn.Linear(3, 4), nn.Embedding(9, 4)


def autoencoder(x: torch.Tensor) -> torch.Tensor:
    mean, scale = ENCODER(x).chunk(2, 1)
    return DECODER(mean + scale * torch.randn_like(scale))


@pytest.mark.parametrize(
    ("step", "into"),
    [
        (autoencoder, "model"),
        (lambda x: F.dropout(ENCODER(F.dropout(x, 0.2)), 0.2), "model"),
        (lambda x: F.dropout1d(ENCODER(x)[None], 0.2), "model"),
        (lambda x: ENCODER(x) * x.new_empty(len(x), 1).bernoulli_(0.9).div_(0.9), "model"),
        (lambda x: ENCODER(x + 0.1 * torch.randn_like(x)), "data"),
        (lambda x: ENCODER(x + 0.1 * torch.randn(4)), "data"),
        (lambda x: TIMES(torch.randint(0, 9, (8,))), "data"),
        (lambda x: ENCODER(torch.randn(8, 4)), "data"),
        (lambda x: ENCODER(x[torch.randperm(8)]), "data"),
        (lambda x: ENCODER(x.masked_fill(torch.rand(8, 1) < 0.5, 0.0)), "data"),
    ],
    ids=["vae", "dropout", "channels", "drop path", "noise", "one noise", "time steps", "latents", "mixup", "masked"],
)
def test_draws_are_followed_to_the_data_or_the_model(step: Callable[[torch.Tensor], torch.Tensor], into: str) -> None:
    tape = RandomReplay()
    tape.flow = DrawFlow()
    tape.flow.begin([ROWS, torch.zeros(8)])
    with tape:
        step(ROWS).sum().backward()
    assert {draw["into"] for draw in tape.flow.found()} == {into}


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    ("call", "seen"),
    [
        (lambda: F.dropout(X, 0.25), 1),
        (lambda: F.dropout1d(X, 0.25), 1),
        (lambda: nn.LSTM(16, 4, 2, dropout=0.25)(X), 1),
        (lambda: F.scaled_dot_product_attention(X, X, X, dropout_p=0.25), 1),
        (lambda: F.dropout(X, 0.25, training=False), 0),
        (lambda: nn.LSTM(16, 4, 2, dropout=0.25).eval()(X), 0),
        (lambda: F.scaled_dot_product_attention(X, X, X), 0),
        (lambda: torch.bernoulli(X / 2), 0),
        (lambda: X + torch.randn_like(X), 0),
    ],
)
def test_dropout_without_gradients_is_seen(call: Any, seen: int, context: Any, tmp_path: Path) -> None:
    recorder, tape = Recorder(tmp_path), RandomReplay()
    tape.flow = DrawFlow(recorder)
    with tape:
        call()
        assert not recorder.events
        with context():
            call()
    assert len(recorder.events) == seen


def taped(draw: Callable[[], Any]) -> tuple[Any, list[Draw]]:
    tape = RandomReplay()
    tape.recording = True
    with tape:
        found = draw()
    return found, [Draw(draw.name, draw.outputs) for draw in tape.draws]


def test_one_process_gets_the_draws_of_the_ranks() -> None:
    drop, parts = nn.Dropout(0.5), [torch.rand(3, 4) for _ in range(2)]
    outputs, tapes = zip(*(taped(lambda part=part: drop(part) + torch.randn(3, 4)) for part in parts), strict=True)
    whole = RandomReplay()
    whole.replay(tapes)
    with whole:
        joined = drop(torch.cat(parts)) + torch.randn(6, 4)
    assert not whole.failures
    torch.testing.assert_close(joined, torch.cat(outputs), rtol=0, atol=0)


def test_a_number_per_batch_cannot_be_given_to_one_process() -> None:
    whole = RandomReplay()
    whole.replay([taped(lambda: torch.rand(()))[1] for _ in range(2)])
    with whole:
        torch.rand(())
    assert "not part of" in whole.failures[0]


@pytest.mark.parametrize("count", [0, 1, 700, 3000])
def test_numbers_of_numpy_and_python_are_counted(count: int) -> None:
    mine = [np.random.default_rng(0), random.Random(0)]
    own, before = OwnGenerators(), states_of_global()
    own.find()
    states = own.states()
    # A generator that is found later does not move the others.
    later = random.Random(1)
    own.find()
    for name in (np.random.random_sample, mine[0].random):
        name(count)
    for _ in range(count):
        random.getrandbits(32)
        mine[1].random()
    assert values_drawn(before, states_of_global()) == ({"NumPy": 2 * count, "Python": count} if count else {})
    assert sorted(drawn(states, own.states()).values()) == ([count, 2 * count] if count else [])
    assert any(generator is later for generator in own.known)


@pytest.mark.parametrize("frozen", [False, True], ids=["", "in a process that forks the runs"])
def test_a_temporary_name_is_drawn_by_no_program(frozen: bool) -> None:
    with tempfile.NamedTemporaryFile():
        multiprocessing.Lock()
    if frozen:
        gc.freeze()
    # A fork draws its names from new generators.
    for sequence in (tempfile._name_sequence, multiprocessing.synchronize.SemLock._rand):
        vars(sequence).pop("_rng_pid")
    own = OwnGenerators()
    try:
        with tempfile.NamedTemporaryFile():
            multiprocessing.Lock()
            own.find()
        before = own.states()
        with tempfile.NamedTemporaryFile():
            multiprocessing.Lock()
            assert drawn(before, own.states()) == {}
    finally:
        gc.unfreeze()


# Loaders and steps.


@pytest.mark.parametrize("workers", [0, 2])
def test_the_indices_of_a_loader_are_seen(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    base: Any = torch.utils.data.dataloader._BaseDataLoaderIter
    for name in ("_next_index", "__next__"):
        monkeypatch.setattr(base, name, getattr(base, name))
    watch_indices()
    taken: list[int] = []
    given: list[Any] = []
    on_indices(lambda _, indices: taken.extend(indices), given.append)
    loader = DataLoader(TensorDataset(torch.arange(10)), 3, True, num_workers=workers, persistent_workers=workers > 0)
    for _ in range(2):
        taken.clear()
        given.clear()
        iterator = iter(loader)
        indices = LoaderIndices(iterator)
        batches = [next(iterator)[0].tolist() for _ in range(2)]
        assert [indices.of_batch(number) for number in range(2)] == batches
        assert taken[:6] == [*batches[0], *batches[1]]
        assert len(given) == 2
        assert indices.drain()
        assert sorted(index for part in indices.lists for index in part) == list(range(10))


def test_kept_graphs_and_backward_passes_are_seen() -> None:
    weight, seen = nn.Parameter(torch.ones(2)), []
    weight.register_hook(lambda gradient: seen.append(in_backward()))
    before = graph_nodes()
    kept = (weight * 2).sum()
    assert graph_nodes() > before
    kept.backward()
    del kept
    assert graph_nodes() == before
    assert (seen, in_backward()) == ([True], False)


def test_the_ranks_of_a_program_with_many_epochs_end_with_the_same_one(tmp_path: Path, monkeypatch: Any) -> None:
    ranks = [LoaderProbe(Recorder(tmp_path), SPEC, None, lambda: None, lambda: None) for _ in range(2)]
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


# Batch norm.

NORMS = {nn.BatchNorm1d: (5, 3), nn.BatchNorm2d: (5, 3, 4, 2), nn.BatchNorm3d: (5, 3, 2, 2, 2)}


def normalize_on_ranks(rank: int) -> None:
    """Compares uneven parts of a batch with one process, for a loss that is no mean over samples."""

    def outputs(norm: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        x = x.clone().requires_grad_()
        y = norm(x)
        (y.sigmoid() ** 2).sum().backward()
        assert x.grad is not None
        return [y.detach(), x.grad]

    part = slice(0, 3) if rank == 0 else slice(3, 5)
    for kind, shape in NORMS.items():
        for affine in (True, False):
            norm = kind(3, affine=affine).double()
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 10
            expected = outputs(kind(3, affine=affine).double(), whole)
            synchronize(nn.Sequential(norm))
            for found, right in zip(outputs(norm, whole[part]), expected, strict=True):
                torch.testing.assert_close(found, right[part], rtol=1e-10, atol=1e-12)
            norm.eval()
            torch.testing.assert_close(norm(whole), whole / (1 + norm.eps) ** 0.5)


def test_synchronized_batch_norm_computes_what_one_process_does(tmp_path: Path) -> None:
    on_ranks(normalize_on_ranks, tmp_path, 2)


@pytest.mark.parametrize(
    ("journal", "alone"),
    [
        ([], False),
        (["collective", "collective"], True),
        (["collective", "backward", "collective"], False),
        (["ddp_forward"], False),
    ],
)
def test_a_rank_trains_alone_while_another_one_waits_that_has_not_trained(
    journal: list[str], alone: bool, tmp_path: Path
) -> None:
    (tmp_path / "journal1.jsonl").write_text("".join(json.dumps({"kind": kind}) + "\n" for kind in journal))
    recorder = Recorder(tmp_path)
    for kind in ("init_process_group", "backward", "step", "save"):
        recorder.add(kind)
    probe = AloneProbe(recorder, SPEC)
    assert probe.is_alone() is alone
    probe.steps = recorder.step = recorder.backwards = 1
    probe.forget()
    assert [event["kind"] for event in recorder.events] == ["init_process_group", "save", "alone"]
    assert (recorder.step, recorder.backwards) == (0, 0)


# The user's code, options and numbers.


@pytest.mark.parametrize(
    ("condition", "read"),
    [
        ("values['loss'] < own.best + loss", {"values['loss']": 2.5, "own.best": 0.5, "loss": 1.5}),
        ("not float(loss.item()) > 1", {"loss": 1.5}),
        ("not stopper.rejects(loss)", {"loss": 1.5}),
    ],
)
def test_the_numbers_that_a_condition_reads(condition: str, read: dict[str, float], tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(f"if {condition}:\n    pass\nif not math.isfinite(loss):\n    raise ValueError\n")
    names = {"loss": torch.tensor(1.5, requires_grad=True), "own": SimpleNamespace(best=0.5)}
    frame: Any = SimpleNamespace(f_locals={**names, "values": {"loss": 2.5, "name": "x"}}, f_globals=globals())
    operands = operands_of_file(str(path))
    # Code that fails does not decide.
    assert list(operands) == [1]
    assert values_of(operands[1], frame) == read


@pytest.mark.parametrize(
    ("names", "values", "found"),
    [
        (["-r", "--resume"], {}, ["--resume", "file"]),
        (["--resume_from_checkpoint"], {"type": str, "default": ""}, ["--resume_from_checkpoint", "file"]),
        (["--restore-dir"], {"type": Path}, ["--restore-dir", "folder"]),
        (["--continue"], {"action": "store_true"}, ["--continue", "nothing"]),
        (["--resume"], {"type": int}, None),
        (["--resume"], {"choices": ["never", "allow"]}, None),
        (["--resume-lr"], {}, None),
        (["--given", "--resume"], {}, None),
    ],
)
def test_an_option_that_resumes_is_known(
    names: list[str], values: dict[str, Any], found: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(argparse.Action, "__init__", argparse.Action.__init__)
    monkeypatch.setattr(sys, "argv", ["train.py", "--given=yes"])
    OptionProbe(tmp_path, SPEC).install()
    argparse.ArgumentParser().add_argument(*names, **values)
    path = tmp_path / OPTIONS
    assert (json.loads(path.read_text()) if path.exists() else None) == found


def test_numbers_that_a_library_prints_or_writes_for_the_program_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[tuple[Any, str]] = [(builtins, "print"), (logging.Logger, "_log"), (json, "dump"), (json, "dumps")]
    for owner, name in [*places, (csv.DictWriter, "writerow"), (Path, "write_text")]:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    library: dict[str, Any] = {}
    source = "def told(value, depth):\n    told(value, depth - 1) if depth else print('mae', value)\n"
    exec(compile(source, f"{sysconfig.get_paths()['purelib']}/library.py", "exec"), library)  # noqa: S102
    recorder = Recorder(tmp_path)
    ReportProbe(recorder).install()
    library["told"](0.25, 2)
    # A progress bar, or the summary of a trainer.
    library["told"](0.5, 20)
    json.dumps({"epoch": 1, "r2": 0.75})
    csv.DictWriter(io.StringIO(), ["auc"]).writerow({"auc": 0.875})
    (tmp_path / "metrics.txt").write_text("wer 0.125")
    found = [(word, value) for event in recorder.events for value, _, word in event["values"]]
    assert found == [("mae", 0.25), ("r2", 0.75), ("auc", 0.875), ("wer", 0.125)]


# Files.


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/hf/datasets/csv/data.arrow", True),
        ("/home/me/.cache/pip/x", True),
        ("/triton/kernel.json", True),
        ("/hf2/model.pt", False),
        ("/home/me/project/model.pt", False),
    ],
)
def test_files_of_a_cache_are_those_of_a_library(path: str, expected: bool) -> None:
    folders = {"HOME": "/home/me", "HF_HOME": "/hf", "TRITON_CACHE_DIR": "/triton", "PROJECT_HOME": "/home/me/project"}
    assert is_cached(path, folders) is expected
