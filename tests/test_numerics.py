"""The numerical plugins under a stock Trainer: several ranks, windows and formats compute what one process computes."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lit_mnist.errors import InputError, NonFiniteError
from lit_mnist.order import epoch_order
from lit_mnist.plugins.accumulation import ExactAccumulation
from lit_mnist.plugins.channels_last import ChannelsLast
from lit_mnist.plugins.finite import StopOnNonFinite
from lit_mnist.plugins.precision import Float16OnCPU, autocast, needs_scaler, precision_plugin, resolve_precision
from lit_mnist.plugins.sampler import ExactDistributedSampler
from lit_mnist.plugins.skipped_steps import SkippedStepSchedule
from lit_mnist.plugins.sync_batch_norm import BatchNormOverRanks, PortableSyncBatchNorm, sync_batch_norm

pytestmark = pytest.mark.timeout(120)
Ranks = Callable[..., list[Any]]

_GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(60, 64, generator=_GENERATOR, dtype=torch.float64) + 3
TARGETS = torch.randint(0, 3, (60,), generator=_GENERATOR)


def stock_trainer(**options: Any) -> Trainer:
    """Returns a Trainer of Lightning on the ranks of the process group, or on one."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": world_size,
        "strategy": "ddp" if world_size > 1 else "auto",
        "use_distributed_sampler": False,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(**defaults | options)


def loader(batch_size: int, samples: int = 60, dtype: torch.dtype = torch.float64) -> DataLoader[Any]:
    data = TensorDataset(INPUTS[:samples].to(dtype), TARGETS[:samples])
    return DataLoader(data, batch_sampler=ExactDistributedSampler(data, batch_size, seed=1))


class Classifier(LightningModule):
    """A linear classifier of 64 inputs; subclasses change its network or its loss."""

    schedule: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.net = self.make_net()
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator)

    def make_net(self) -> nn.Module:
        return nn.Linear(64, 3).double()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


def state(module: nn.Module) -> torch.Tensor:
    """Returns all weights and buffers in one vector, in 64 bits."""
    return torch.cat([value.detach().double().flatten() for value in module.state_dict().values()])


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


# --- batch norm


def layer_errors(dtype: torch.dtype, offset: float) -> dict[str, float]:
    """Returns the largest error of each result of synchronized batch norm, relative to the largest value.

    The exact results are those of torch's batch norm of the whole batch in 64 bits.
    """
    rank, errors = dist.get_rank(), {}
    shares = [5, 1, 3][: dist.get_world_size()]
    mine = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
    shapes = (nn.BatchNorm1d, ()), (nn.BatchNorm1d, (6,)), (nn.BatchNorm2d, (4, 5)), (nn.BatchNorm3d, (2, 3, 4))
    for kind, shape in shapes:
        generator = torch.Generator().manual_seed(len(shape))
        x, noise = torch.randn(2, sum(shares), 4, *shape, generator=generator, dtype=torch.float64)
        # The gradient follows the input, so that the two terms of the input's gradient nearly cancel.
        inputs, grad = (2 * x + offset).to(dtype), (x + 0.1 * noise).to(dtype)
        exact = results(kind(4).double(), inputs.double(), grad.double())
        layer = sync_batch_norm(kind(4).to(torch.promote_types(dtype, torch.float32)), "cpu")
        found = results(layer, inputs[mine], grad[mine])
        for name, value in found.items():
            if name in {"weight", "bias"}:
                dist.all_reduce(value)
            whole = exact[name][mine] if name in {"output", "input"} else exact[name]
            errors[f"{name} of {kind.__name__}"] = distance(value, whole) / float(exact[name].abs().max())
    return errors


def results(layer: nn.Module, inputs: torch.Tensor, grad: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns output, gradients and running buffers of a batch norm of four channels, in 64 bits."""
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(0.5, 2, 4))
        layer.bias.copy_(torch.linspace(-1, 1, 4))
    inputs = inputs.clone().requires_grad_()
    output = layer(inputs)
    output.backward(grad)
    assert output.dtype == inputs.grad.dtype == inputs.dtype
    values = {"output": output, "input": inputs.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}
    values |= {"mean": layer.running_mean, "variance": layer.running_var}
    return {name: value.detach().double() for name, value in values.items()}


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.nightly), 3])
@pytest.mark.parametrize(
    ("dtype", "offset", "tolerance"),
    [
        (torch.float64, 0, 1e-10),
        (torch.float64, 1e4, 1e-10),
        (torch.float32, 0, 1e-5),
        (torch.float32, 1e3, 1e-3),
        (torch.bfloat16, 0, 1e-2),
        (torch.float16, 0, 1e-3),
        (torch.float16, 100, 1e-3),
    ],
)
def test_batch_norm_over_uneven_ranks_is_that_of_the_whole_batch(
    ranks: Ranks, world_size: int, dtype: torch.dtype, offset: float, tolerance: float
) -> None:
    for errors in ranks(world_size, layer_errors, dtype, offset):
        assert max(errors.values()) < tolerance, errors


class Normalized(Classifier):
    """Batch norm of each dimension and kind; one layer is used twice."""

    def make_net(self) -> nn.Module:
        shared = nn.BatchNorm1d(16)
        return nn.Sequential(
            nn.Unflatten(1, (1, 4, 4, 4)), nn.Conv3d(1, 2, 3, padding=1), nn.BatchNorm3d(2), nn.Flatten(1, 2),
            nn.Conv2d(8, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=None), nn.ReLU(), nn.Flatten(2),
            nn.BatchNorm1d(4, affine=False), nn.Flatten(), nn.Linear(64, 16), shared, nn.ReLU(), nn.Linear(16, 16),
            shared, nn.BatchNorm1d(16, track_running_stats=False), nn.Linear(16, 3),
        ).double()  # fmt: skip

    def on_train_start(self) -> None:
        assert any(isinstance(layer, BatchNormOverRanks) for layer in self.modules()) == (self.trainer.world_size > 1)


def train_normalized() -> torch.Tensor:
    module = Normalized()
    kinds = [type(layer) for layer in module.modules()]
    stock_trainer(max_epochs=2, plugins=[PortableSyncBatchNorm()]).fit(module, loader(12))
    assert [type(layer) for layer in module.modules()] == kinds
    return state(module)


def test_a_training_with_batch_norm_does_not_depend_on_the_number_of_ranks(ranks: Ranks) -> None:
    (whole,) = ranks(1, train_normalized)
    for world_size in (2, 3):
        for found in ranks(world_size, train_normalized):
            assert distance(found, whole) < 1e-9


# --- accumulation


def train_accumulated(accumulate: int) -> torch.Tensor:
    module = Classifier()
    trainer = stock_trainer(max_epochs=2, callbacks=[ExactAccumulation()], accumulate_grad_batches=accumulate)
    trainer.fit(module, loader(12))
    return state(module)


def train_whole(windows: list[int]) -> torch.Tensor:
    """Trains with each window of micro-batches of 12 samples as one batch."""
    module = Classifier()
    optimizer = module.configure_optimizers()
    for epoch in range(2):
        order = torch.from_numpy(epoch_order(1, epoch, len(INPUTS)))
        for rows in order.split([12 * window for window in windows]):
            optimizer.zero_grad()
            F.cross_entropy(module.net(INPUTS[rows]), TARGETS[rows]).backward()
            optimizer.step()
    return state(module)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("accumulate", "windows"), [(3, [3, 2]), pytest.param(8, [5], marks=pytest.mark.nightly)])
def test_accumulated_gradients_are_those_of_the_whole_batch(
    ranks: Ranks, world_size: int, accumulate: int, windows: list[int]
) -> None:
    whole = train_whole(windows)
    for found in ranks(world_size, train_accumulated, accumulate):
        assert distance(found, whole) < 1e-12


class Endless(IterableDataset[Any]):
    """Samples without a number."""

    def __iter__(self) -> Iterator[Any]:
        yield from zip(INPUTS, TARGETS, strict=True)


def test_accumulation_without_a_length_is_rejected() -> None:
    trainer = stock_trainer(accumulate_grad_batches=2, callbacks=[ExactAccumulation()])
    with pytest.raises(InputError, match="no length"):
        trainer.fit(Classifier(), DataLoader(Endless(), 12))


# --- float16 and values that are not finite


class Half(Classifier):
    """Its gradient overflows in float16 in the third step, on the last rank alone."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes, self.rates, self.weights = set(), [], []

    def make_net(self) -> nn.Module:
        return nn.Linear(64, 3)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.net(batch[0])
        self.dtypes.add(logits.dtype)
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        self.weights.append(self.net.weight.detach().clone())
        loss = F.cross_entropy(logits.float(), batch[1])
        is_last_rank = self.global_rank == self.trainer.world_size - 1
        return loss * 1e30 if batch_idx == 2 and self.current_epoch == 0 and is_last_rank else loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train_half(path: Path) -> dict[str, Any]:
    module, plugin = Half(), Float16OnCPU(init_scale=1024.0)
    trainer = stock_trainer(plugins=[plugin], callbacks=[SkippedStepSchedule(), StopOnNonFinite()])
    trainer.fit(module, loader(12, dtype=torch.float32))
    trainer.save_checkpoint(path)
    weights = [*module.weights, module.net.weight.detach()]
    saved = torch.load(path, weights_only=True)
    resumed = Half()
    trainer = stock_trainer(
        plugins=[Float16OnCPU()], callbacks=[SkippedStepSchedule(), StopOnNonFinite()], max_epochs=2
    )
    trainer.fit(resumed, loader(12, dtype=torch.float32), ckpt_path=path)
    return {
        "dtypes": module.dtypes,
        "changed": [not torch.equal(one, other) for one, other in pairwise(weights)],
        "weights": weights[-1],
        "rates": module.rates,
        # As on GPUs, so that the run can resume there.
        "saved scale": saved[MixedPrecision.__qualname__]["scale"],
        "resumed scale": trainer.precision_plugin.scaler.get_scale(),
        "resumed rates": resumed.rates,
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_overflow_in_float16_is_skipped_on_all_ranks_and_the_schedule_waits(
    ranks: Ranks, tmp_path: Path, world_size: int
) -> None:
    found = ranks(world_size, train_half, tmp_path / "half.ckpt")
    weights = [each.pop("weights") for each in found]
    assert all(torch.equal(each, weights[0]) for each in weights)
    for each in found:
        assert each == {
            "dtypes": {torch.float16},
            "changed": [True, True, False, True, True],
            "rates": [1, 1 / 2, 1 / 4, 1 / 4, 1 / 8],
            "saved scale": 512,
            "resumed scale": 512,
            "resumed rates": [2**-step for step in range(4, 9)],
        }


class NotFinite(Half):
    """Its loss or gradient is not finite in the third step, on the last rank alone."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.net(batch[0]).float(), batch[1])
        is_wrong = batch_idx == 2 or (self.what == "overflow" and batch_idx > 2)
        if not is_wrong or self.global_rank == 0:
            return loss
        if self.what in {"gradient", "overflow"}:
            loss.register_hook(lambda grad: grad * torch.inf)
        return {"NaN": loss * torch.nan, "infinite, with a finite gradient": loss + torch.inf}.get(self.what, loss)


def train_not_finite(what: str, accumulate: int) -> str:
    plugins = [Float16OnCPU(init_scale=1.0)] if what == "overflow" else []
    module = NotFinite(what)
    trainer = stock_trainer(plugins=plugins, callbacks=[StopOnNonFinite()], accumulate_grad_batches=accumulate)
    with pytest.raises(NonFiniteError) as error:
        trainer.fit(module, loader(6, dtype=torch.float32))
    assert bool(state(module).isfinite().all())
    return str(error.value)


@pytest.mark.parametrize(
    ("what", "accumulate", "message"),
    [
        ("NaN", 1, "The loss was nan on rank 1 in step 3"),
        ("NaN", 4, "The loss was nan on rank 1 in step 1"),
        ("infinite, with a finite gradient", 1, "The loss was inf on rank 1 in step 3"),
        ("gradient", 1, "The gradient was not finite in step 3"),
        ("overflow", 1, "The gradient overflows in float16 in step 4, though the scale of the loss has fallen to 0.5"),
    ],
)
def test_a_value_that_is_not_finite_ends_all_ranks_in_its_step(
    ranks: Ranks, what: str, accumulate: int, message: str
) -> None:
    for found in ranks(2, train_not_finite, what, accumulate):
        assert found.startswith(message)


@pytest.mark.parametrize("precision", ["32-true", "64-true", "16-mixed", "bf16-mixed"])
def test_a_hand_written_loop_computes_in_the_types_of_the_plugin(precision: Any) -> None:
    plugin = precision_plugin(precision, "cpu")
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    if precision == "64-true":
        layer, x = layer.double(), x.double()
    with plugin.forward_context():
        expected = layer(x).dtype
    with autocast(precision, "cpu"):
        assert layer(x).dtype == expected
    assert needs_scaler(precision) == (getattr(plugin, "scaler", None) is not None)


def test_the_automatic_precision_depends_on_the_device() -> None:
    assert resolve_precision("auto", "cuda")[0] == "16-mixed"
    assert resolve_precision("auto", "cpu")[0] in {"32-true", "bf16-mixed"}
    assert resolve_precision("64-true", "cuda")[0] == "64-true"


# --- channels last


class Convolutional(Classifier):
    """Convolutions of two and three dimensions; records whether a weight is in channels-last format."""

    formats: set[bool]

    def make_net(self) -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (1, 4, 4, 4)), nn.Conv3d(1, 2, 3, padding=1), nn.Flatten(1, 2),
            nn.Conv2d(8, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3),
        ).double()  # fmt: skip

    def on_train_batch_end(self, *_: Any) -> None:
        self.formats = {self.net[3].weight.is_contiguous(memory_format=torch.channels_last)}


def test_channels_last_weights_are_contiguous_in_checkpoints_and_at_the_end(tmp_path: Path) -> None:
    states = []
    for callbacks in ([], [ChannelsLast()]):
        module, path = Convolutional(), tmp_path / f"{len(callbacks)}.ckpt"
        checkpoint = ModelCheckpoint(tmp_path, filename=str(len(callbacks)))
        trainer = stock_trainer(callbacks=[*callbacks, checkpoint], enable_checkpointing=True)
        trainer.fit(module, loader(12))
        assert module.formats == {bool(callbacks)}
        resumed = Convolutional()
        stock_trainer(callbacks=callbacks, max_epochs=2).fit(resumed, loader(12), ckpt_path=path)
        saved = torch.load(path, weights_only=True)["state_dict"]
        for weights in (saved, module.state_dict(), resumed.state_dict()):
            assert all(value.is_contiguous() for value in weights.values())
        states.append(torch.cat([torch.cat([value.flatten() for value in saved.values()]), state(resumed)]))
    assert distance(*states) < 1e-12
