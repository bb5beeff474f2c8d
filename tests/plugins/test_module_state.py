"""ExactCheckpoint: every attribute of a module has its value at the save after a resume, whatever its type."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from killed_runs import SignalAt, Training, assert_resumes
from lightning.pytorch import LightningModule
from modules import INPUTS, TARGETS, AutoEncoder
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_mnist.errors import InputError
from lit_mnist.plugins.plain_values import NotPlainError, pack, unpack

pytestmark = pytest.mark.timeout(120)
CPU = torch.device("cpu")
IN_USE = defaultdict(lambda: "nothing")


class Phase(Enum):
    WARM_UP = "warm-up"
    MAIN = "main"


class Pair(NamedTuple):
    first: Any
    second: Any


class Text(str):
    """A text whose own text is another one."""

    def __str__(self) -> str:
        return "another"


class Number(int):
    pass


class Bag(dict[str, Any]):
    pass


@dataclass
class Record:
    step: int
    losses: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Key:
    name: str
    step: int


class Meter:
    """An object of the user with slots, and an attribute that cannot be stored."""

    __slots__ = ("_lock", "total")

    def __init__(self) -> None:
        self.total, self._lock = 0.0, threading.Lock()


class EveryType(nn.Module):
    """A child whose attributes change in each step, and whose factor depends on all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(16, 4)
        self.scalar, self.array = np.float32(1), np.zeros(3)
        self.table = np.zeros(2, dtype=[("step", "i4"), ("loss", "f8")])
        self.groups: defaultdict[str, list[int]] = defaultdict(list)
        self.seen: Counter[str] = Counter()
        self.order = OrderedDict.fromkeys("abc", 0)
        self.recent: deque[float] = deque(maxlen=3)
        self.frozen, self.pair = frozenset[int](), Pair(0, [])
        self.content, self.buffer, self.wave = b"", bytearray(), 0j
        self.dtype, self.size, self.device = torch.float32, torch.Size([1]), torch.device("cpu")
        self.number, self.text, self.bag = Number(0), Text("a"), Bag()
        self.phase, self.path, self.time = Phase.WARM_UP, Path("runs"), datetime(2020, 1, 1, tzinfo=UTC)
        self.price, self.ratio, self.slice, self.range = Decimal(1), Fraction(1), slice(0), range(0)
        self.record, self.records, self.keys = Record(0), list[Record](), dict[Key, int]()
        self.nan, self.meters = 0.0, {"a": Meter()}
        self.alias = self.shared = list[int]()
        self.cycle: list[Any] = [0]
        self.cycle.append(self.cycle)
        self.whole = torch.zeros(4)
        self.part = self.whole[2:]
        self.hidden = [nn.Linear(1, 1)]
        self.learned = torch.zeros((), requires_grad=True)
        self.unnamed: Any = lambda: 1.0

    def change(self, step: int, loss: float) -> None:
        self.scalar, self.array[step % 3] = np.float32(self.scalar + 0.5), step
        self.table[step % 2] = (step, loss)
        self.groups[str(step % 3)].append(step)
        self.seen.update("ab" if step % 2 else "a")
        self.order.move_to_end("abc"[step % 3])
        self.recent.append(loss)
        self.frozen, self.pair = self.frozen | {step % 5}, Pair(step, [*self.pair.second[-2:], step])
        self.content, self.wave = bytes([step]), self.wave + 1j
        self.buffer.append(step)
        self.dtype, self.size = (torch.float64, torch.float32)[step % 2], torch.Size([step])
        self.number, self.text = Number(self.number + 1), Text(self.text + "b")
        self.bag["step"] = self.bag.get("step", 0) + 1
        self.phase, self.path = (Phase.MAIN if step > 3 else Phase.WARM_UP), self.path / "a"
        self.time += timedelta(days=1)
        self.price, self.ratio = self.price + Decimal("0.1"), self.ratio + Fraction(1, 3)
        self.slice, self.range = slice(step), range(step)
        self.record.step, self.nan = step, float("nan") if step % 2 else -0.0
        self.records.append(Record(step, self.record.losses))
        self.keys[Key("a", step % 4)] = step
        self.meters["a"].total += 1
        self.shared.append(step)
        self.cycle[0] += 1
        self.whole += 1
        self.hidden[0].weight.data.add_(1)
        if step == 2:
            self.created = [step]
        if step == 4:
            del self.unnamed

    def factor(self) -> float:
        assert self.alias is self.shared
        assert self.cycle[1] is self.cycle
        assert all(each.losses is self.record.losses for each in self.records)
        values = [
            *(float(self.scalar), self.array.sum(), self.table["step"].sum(), len(self.groups["0"]), self.seen["a"]),
            *("abc".index(next(iter(self.order))), len(self.recent), len(self.frozen), sum(self.pair.second)),
            *(sum(self.content), sum(self.buffer), self.wave.imag, self.dtype.itemsize, self.size[0], int(self.number)),
            *(len(self.text), self.bag.get("step", 0), self.phase is Phase.MAIN, len(self.path.parts), self.time.day),
            *(float(self.price), float(self.ratio), self.slice.stop, len(self.range), self.record.step),
            *(
                len(self.records),
                sum(self.keys.values()),
                self.nan != self.nan,
                self.meters["a"].total,
                len(self.alias),
            ),
            *(self.cycle[0], float(self.part.sum()), float(self.hidden[0].weight) % 3, hasattr(self, "created")),
            *(
                hasattr(self, "unnamed"),
                self.recent.maxlen,
                len(type(self.text).__name__),
                len(type(self.bag).__name__),
            ),
        ]
        # All weights differ, so that two wrong values do not cancel.
        return 1 + 0.01 * sum((index + 1) ** 0.5 * float(value) for index, value in enumerate(values)) / len(values)


class Attributes(LightningModule):
    """Attributes of every type, the hyperparameters, and hooks that set some of them again."""

    def __init__(self, beta: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.child = EveryType()
        self.scale_loss = False
        self.stale: Any = 1

    def on_train_start(self) -> None:
        self.scale_loss, self.stale, self.extra = True, 2, [1]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.child.net(batch[0]) * self.hparams.beta + self.child.learned
        factor = self.child.factor() * (7 if self.scale_loss else 1) * (3 if hasattr(self, "stale") else 1)
        loss: torch.Tensor = (
            F.cross_entropy(logits, batch[1]) * factor * (len(self.extra) if hasattr(self, "extra") else 1)
        )
        self.child.change(self.global_step, float(loss))
        self.hparams.beta += 0.1
        self.scale_loss = False
        self.__dict__.pop("stale", None)
        self.__dict__.pop("extra", None)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), self.child.learned], 0.01)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(INPUTS, TARGETS), 6)


@pytest.mark.parametrize("world_size", [1, 2])
def test_attributes_of_every_type_have_the_values_of_the_save(world_size: int, tmp_path: Path) -> None:
    training = Training(Attributes, tmp_path / "run", world_size, 1, {"max_epochs": 1, "num_sanity_val_steps": 0})
    assert_resumes(training, training.complete(), [1, 6])


class Unstorable(Attributes):
    """Attributes that cannot be stored: some change, and others do not."""

    def __init__(self) -> None:
        super().__init__()
        self.loss_fn, self.lock = F.cross_entropy, threading.Lock()
        self.log_file = Path(os.devnull).open()  # noqa: SIM115
        self.by_name = {"lambda": lambda: 1, "lock": threading.Lock()}
        self.batches: Iterator[int] | None = None
        self.meter = Meter()
        # Kinds of tensors and arrays that have no plain memory, of which some are large.
        self.mapped = np.memmap("/dev/zero", np.uint8, "r", shape=(1 << 20,))
        self.sparse, self.hits = torch.eye(3).to_sparse(), torch.eye(3).to_sparse()
        self.nested = torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)])
        self.quantized = torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8)
        self.missing, self.mask = torch.zeros(1 << 20, device="meta"), np.ma.zeros(3)
        self.names = np.array([None])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.batches is None:
            self.batches = iter([1, 2])
            self.child.net.rule = lambda: 1
        self.hits.mul_(2)
        self.mask[0] = np.ma.masked
        return super().training_step(batch, batch_idx)


def test_changed_attributes_that_cannot_be_stored_are_named(tmp_path: Path) -> None:
    training = Training(Unstorable, tmp_path / "run", 1, 1, {"max_epochs": 1, "num_sanity_val_steps": 0})
    stopped = training.run(stop=SignalAt(3, signal.SIGTERM))
    named = (
        "self.batches (list_iterator), self.hits (Tensor), self.mask (MaskedArray), self.names (ndarray), "
        "child.net.rule (function)"
    )
    assert stopped.out.count("warning: ") == 1, stopped.out
    assert f"warning: ExactCheckpoint cannot store {named}: " in stopped.out
    resumed = training.run()
    assert resumed.code == 0, resumed.err
    assert f"warning: The checkpoint does not have the values of {named}." in resumed.out


def test_a_changed_program_is_stated_and_has_the_saved_values(tmp_path: Path) -> None:
    training = Training(Attributes, tmp_path / "run", 1, 1, {"max_epochs": 1, "num_sanity_val_steps": 0})
    reference = training.complete()
    (training.folder / "last.ckpt").unlink()
    training.run(stop=SignalAt(5, signal.SIGTERM))
    changed = replace(training, make=lambda: Attributes(0.5))
    done = changed.run()
    assert (
        "warning: The program has changed since the training was saved: self._hparams.beta (0.5, was 0.1)" in done.out
    )
    assert changed.results() == reference


def test_a_changed_accumulation_is_stated_and_has_the_saved_value(tmp_path: Path) -> None:
    options = {"max_epochs": 1, "num_sanity_val_steps": 0, "accumulate_grad_batches": 2}
    training = Training(AutoEncoder, tmp_path / "run", 1, 1, options)
    reference = training.complete()
    (training.folder / "last.ckpt").unlink()
    training.run(stop=SignalAt(3, signal.SIGTERM))
    done = replace(training, options={**options, "accumulate_grad_batches": 1}).run()
    assert (
        "warning: The program has changed since the training was saved: accumulate_grad_batches is 1, was 2."
        in done.out
    )
    assert training.results() == reference


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), st.text(), st.binary(), st.decimals(),
    st.fractions(), st.datetimes(timezones=st.just(UTC)), st.timedeltas(), st.sampled_from(Phase),
    st.integers().map(Number), st.text().map(Text), st.binary().map(bytearray),
    st.sampled_from([torch.half, torch.int8]),
    st.floats(width=32).map(np.float32), st.text(st.characters(codec="ascii")).map(PurePosixPath),
)  # fmt: skip
HASHABLE = st.one_of(
    st.none(), st.integers(), st.text(), st.builds(Key, st.text(), st.integers()), st.sampled_from(Phase)
)
VALUES = st.recursive(
    LEAVES,
    lambda each: st.one_of(
        st.lists(each), st.dictionaries(HASHABLE, each), st.dictionaries(HASHABLE, each).map(OrderedDict),
        st.dictionaries(st.text(), each).map(Bag), st.tuples(each, each).map(lambda both: Pair(*both)),
        st.frozensets(HASHABLE), st.sets(HASHABLE), st.lists(each).map(lambda values: deque(values, 4)),
        st.dictionaries(HASHABLE, each).map(lambda values: defaultdict(list, values)),
        st.builds(Record, each, st.lists(each)), st.lists(each).map(tuple), st.lists(HASHABLE).map(Counter),
    ),
    max_leaves=12,
)  # fmt: skip


def exactly(value: Any) -> Any:
    """Returns a value that is equal only for equal types and values."""
    kind, own = type(value).__name__, getattr(value, "default_factory", getattr(value, "maxlen", None))
    if isinstance(value, dict):
        return kind, own, [(exactly(key), exactly(each)) for key, each in value.items()]
    if isinstance(value, set | frozenset):
        return kind, {exactly(each) for each in value}
    if isinstance(value, list | tuple | deque):
        return kind, own, tuple(exactly(each) for each in value)
    if isinstance(value, Record):
        return kind, exactly(value.step), exactly(value.losses)
    if isinstance(value, float | complex | np.floating):
        return kind, np.asarray(value).tobytes()
    return kind, str.__str__(value) if isinstance(value, str) else repr(value)


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_nested_values_are_restored_exactly(value: Any) -> None:
    assert exactly(unpack(pack(value), CPU)) == exactly(value)


@pytest.mark.parametrize("length", [*range(12), 10_000])
def test_values_without_tensors_are_the_file_that_safetensors_writes(length: int) -> None:
    content = pack(["x" * length])
    text = safetensors.torch.load(content)["json"]
    assert content == safetensors.torch.save({"json": text})


ARRAYS = [
    np.arange(6).reshape(2, 3).T,
    np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8", (2,))]),
    np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])[0],
    np.array([1], ">i2"),
    np.zeros((0, 3)),
    np.array(["a", "bcd"]),
    np.datetime64("2020-01-01"),
    np.longdouble(1) / 3,
    np.array(2.5),
    np.str_(""),
]


@pytest.mark.parametrize("array", ARRAYS, ids=str)
def test_arrays_are_restored_exactly(array: Any) -> None:
    found = unpack(pack([array]), CPU)[0]
    assert (type(found), found.dtype, found.shape) == (type(array), array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()
    assert np.asarray(found).flags.f_contiguous == np.asarray(array).flags.f_contiguous


TENSORS = [
    torch.tensor(3),
    torch.zeros(0, 2),
    torch.randn(2, 3).T,
    torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    torch.randn(3).expand(2, 3),
    torch.randn(3, dtype=torch.bfloat16),
    torch.tensor([1 + 1j]).conj(),
    torch.randn(2, requires_grad=True),
    nn.Parameter(torch.randn(2)),
]


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda each: f"{list(each.shape)}-{each.dtype}")
def test_tensors_are_restored_exactly(tensor: torch.Tensor) -> None:
    found = unpack(pack({"a": [tensor]}), CPU)["a"][0]
    assert (type(found), found.dtype, found.stride()) == (type(tensor), tensor.dtype, tensor.stride())
    assert torch.equal(found, tensor)
    assert found.requires_grad == tensor.requires_grad


def test_shared_values_and_shared_memory_stay_shared() -> None:
    whole, values = torch.zeros(6), [1]
    found = unpack(pack([whole, whole[2:], whole.view(2, 3), whole, values, {"a": (values,)}]), CPU)
    found[1][0] = 9
    assert found[0].tolist() == [0, 0, 9, 0, 0, 0]
    assert found[2][0, 2] == 9
    assert found[3] is found[0]
    assert found[5]["a"][0] is found[4]
    # A view does not store the memory around it.
    assert len(pack(torch.zeros(1000, 1000)[:, 0])) < 20_000


class Gadget:
    """A class whose finalizer would do something with the attributes of the file."""

    path = ""

    def __del__(self) -> None:
        if self.path:
            Path(self.path).unlink()


@dataclass
class FinalizedRecord(Gadget):
    path: str = ""


def forged(nodes: list[dict[str, Any]]) -> bytes:
    text = json.dumps({"root": [0], "nodes": nodes}).encode()
    return safetensors.torch.save({"json": torch.frombuffer(bytearray(text), dtype=torch.uint8)})


@pytest.mark.parametrize(
    "node",
    [
        {"kind": "object", "class": "this:Nothing", "attributes": {}, "place": ""},
        {"kind": "object", "class": "subprocess:Popen", "attributes": {"pid": 1}, "place": ""},
        {"kind": "object", "class": f"{__name__}:FinalizedRecord", "attributes": {"path": "/etc/x"}, "place": ""},
        {"kind": "object", "class": "tempfile:_TemporaryFileCloser", "attributes": {"name": "x"}, "place": ""},
        {"kind": "dict", "class": "antigravity:Bag", "items": []},
        {"kind": "str", "class": "os:system", "content": "true"},
        {"kind": "tuple", "class": "builtins:eval", "items": ["1"]},
        {"kind": "enum", "class": "os:_Environ", "named": True, "content": "HOME"},
        {"kind": "defaultdict", "items": [], "factory": [1]},
        {"kind": "type", "content": "eval"},
        {"kind": "np.dtype", "content": "__import__('os').system('true')"},
        {"kind": "dtype", "content": "load"},
        {"kind": "live", "at": "os:system", "class": "builtins:function"},
        {"kind": "tuple", "items": [[0]]},
        {"kind": "tuple", "items": [[7]]},
        {"kind": "tensor", "memory": "json", "dtype": "float64", "size": [999], "stride": [1], "offset": 0, "on": "cpu",
         "grad": False, "parameter": False},
        {"kind": "nothing"},
    ],
)  # fmt: skip
def test_a_hostile_file_is_rejected_and_imports_nothing(node: dict[str, Any]) -> None:
    before = set(sys.modules)
    with pytest.raises(InputError, match="cannot be read"):
        unpack(forged([node, {"kind": "type", "content": "eval"}]), CPU)
    assert not {"this", "antigravity"} & (set(sys.modules) - before)


@pytest.mark.parametrize("value", [b"", b"abc", forged([])])
def test_a_damaged_file_is_rejected(value: bytes) -> None:
    with pytest.raises(InputError):
        unpack(value, CPU)


def unstorable() -> list[Any]:
    return [lambda: 1, threading.Lock(), (each for each in "a"), iter([1]), np.array([None]), random, Meter(), IN_USE]


@pytest.mark.parametrize("index", range(8))
def test_what_cannot_be_stored_is_rejected(index: int) -> None:
    with pytest.raises(NotPlainError):
        pack({"a": [unstorable()[index]]})
