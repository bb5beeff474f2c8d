"""ExactCheckpoint: every attribute of a module has its value at the save after a resume, whatever its type."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from killed_runs import Training, assert_resumes
from lightning.pytorch import LightningModule
from modules import INPUTS, TARGETS
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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
