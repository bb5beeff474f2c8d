"""N ranks with batch norm compute what one rank does, and float16 on CPUs is float16."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import run_forked
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from processes import ROOT
from ranks import results_of_ranks, stock_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_mnist.distributed.rank import Rank
from lit_mnist.errors import InputError
from lit_mnist.plugins import ExactDistributedSampler, Float16OnCPU, PortableSyncBatchNorm

_DATA = torch.Generator().manual_seed(0)
INPUTS = torch.randn(60, 64, generator=_DATA, dtype=torch.float64) + 3
TARGETS = torch.randint(0, 3, (60,), generator=_DATA)


class Normalized(LightningModule):
    """A network with batch norm of each dimension, in double precision; one layer is used twice."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.BatchNorm1d(16)
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, 4, 4, 4)), nn.Conv3d(1, 2, 3, padding=1), nn.BatchNorm3d(2), nn.Flatten(1, 2),
            nn.Conv2d(8, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=None), nn.ReLU(), nn.Flatten(2),
            nn.BatchNorm1d(4, affine=False), nn.Flatten(), nn.Linear(64, 16), shared, nn.ReLU(), nn.Linear(16, 16),
            shared, nn.BatchNorm1d(16, track_running_stats=False), nn.Linear(16, 3),
        ).double()  # fmt: skip
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator)
        self.calls = 0
        shared.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


def train(rank: Rank, folder: Path, plugins: list[Any]) -> dict[str, Any]:
    data = TensorDataset(INPUTS, TARGETS)
    loader = DataLoader(data, batch_sampler=ExactDistributedSampler(data, 12, seed=1))
    trainer = stock_trainer(rank.world_size, folder, max_epochs=2, plugins=plugins, use_distributed_sampler=False)
    module = Normalized()
    trainer.fit(module, loader)
    assert module.calls == 20
    return {name: value.double().tolist() for name, value in module.state_dict().items()}


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max(
        float((torch.tensor(value, dtype=torch.float64) - torch.tensor(other[name], dtype=torch.float64)).abs().max())
        for name, value in one.items()
    )


def test_weights_and_buffers_of_several_ranks_are_those_of_one(tmp_path: Path) -> None:
    def synchronized(rank: Rank) -> dict[str, Any]:
        return train(rank, tmp_path, [PortableSyncBatchNorm(timeout=30)])

    (whole,) = results_of_ranks(lambda rank: train(rank, tmp_path, []), tmp_path / "1", 1)
    assert distance(results_of_ranks(synchronized, tmp_path / "one", 1)[0], whole) == 0
    for world_size in (2, 3):
        for found in results_of_ranks(synchronized, tmp_path / str(world_size), world_size):
            assert distance(found, whole) < 1e-9
    # Without the plugin, each rank normalizes its own samples.
    assert distance(results_of_ranks(lambda rank: train(rank, tmp_path, []), tmp_path / "plain", 2)[0], whole) > 1e-3


def test_lightnings_own_option_rejects_cpus(tmp_path: Path) -> None:
    def work(rank: Rank) -> str:
        trainer = stock_trainer(rank.world_size, tmp_path, max_epochs=1, sync_batchnorm=True)
        with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules"):
            trainer.fit(Normalized(), DataLoader(TensorDataset(INPUTS, TARGETS), 12))
        return "rejected"

    assert results_of_ranks(work, tmp_path, 2) == ["rejected"] * 2


def test_a_batch_norm_of_another_class_is_named() -> None:
    class Own(nn.BatchNorm2d):
        pass

    plugin, net = PortableSyncBatchNorm(), nn.Sequential(Own(3), nn.BatchNorm2d(3))
    with pytest.warns(UserWarning, match="does not synchronize 0, a Own"):
        plugin.apply(net)
    plugin.revert(net)
    assert [type(layer) for layer in net] == [Own, nn.BatchNorm2d]
    with pytest.raises(InputError, match="timeout must be positive"):
        PortableSyncBatchNorm(0)


class Half(LightningModule):
    """Records the types in which it computes; its loss overflows in the third step."""

    def __init__(self, *, manual: bool = False, huge: bool = True) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.automatic_optimization = not manual
        self.dtypes: list[torch.dtype] = []
        self.norms: list[float] = []
        self.weights: list[torch.Tensor] = []
        self.huge = huge
        self.first_bias = self.net.bias.detach().clone()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.weights.append(self.net.weight.detach().clone())
        out = self.net(batch[0])
        self.dtypes.append(out.dtype)
        loss = out.float().square().mean() * (1e30 if batch_idx == 2 and self.huge else 1)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(float(self.net.weight.grad.norm()))  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def loader() -> Any:
    return DataLoader(TensorDataset(INPUTS[:, :4].float()), 12)


@pytest.mark.parametrize("manual", [False, True])
def test_an_overflow_skips_a_step_and_gradients_are_unscaled(tmp_path: Path, manual: bool) -> None:
    def work() -> int:
        module, plugin = Half(manual=manual), Float16OnCPU(init_scale=1024.0)
        clip = {} if manual else {"gradient_clip_val": 0.1}
        trainer = stock_trainer(1, tmp_path, max_epochs=1, plugins=[plugin], **clip)
        trainer.fit(module, loader())
        assert set(module.dtypes) == {torch.float16}
        weights = [*module.weights, module.net.weight.detach()]
        changed = [not torch.equal(one, other) for one, other in pairwise(weights)]
        assert changed == [True, True, False, True, True]
        assert plugin.scaler is not None
        assert plugin.scaler.get_scale() == 512
        # Without overflow, float32 has these norms, up to the precision of float16.
        plain = Half(manual=manual)
        plain.load_state_dict({"net.weight": weights[0], "net.bias": module.first_bias})
        norm = float(
            torch.autograd.grad(plain.net(INPUTS[:12, :4].float()).square().mean(), plain.net.weight)[0].norm()
        )
        assert module.norms[0] == pytest.approx(norm, rel=0.2)
        if not manual:
            step = (weights[1] - weights[0]).norm() / 0.01
            assert step <= 0.1 * 1.001
        return 0

    done = run_forked(work, tmp_path)
    assert done.code == 0, done.err


def test_the_scaler_is_in_the_checkpoint_under_lightnings_name(tmp_path: Path) -> None:
    def work() -> int:
        trainer = stock_trainer(1, tmp_path, max_epochs=1, plugins=[Float16OnCPU(init_scale=256.0)])
        trainer.fit(Half(), loader())
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
        # As on GPUs, so that a run can resume there.
        assert saved[MixedPrecision.__qualname__]["scale"] == 128.0

        class Check(Callback):
            def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
                assert trainer.precision_plugin.scaler.get_scale() == 128.0  # type: ignore[union-attr]
                print("restored")

        again = stock_trainer(1, tmp_path, max_epochs=2, plugins=[Float16OnCPU()], callbacks=[Check()])
        again.fit(Half(huge=False), loader(), ckpt_path=tmp_path / "a.ckpt")
        return 0

    done = run_forked(work, tmp_path)
    assert done.code == 0, done.err
    assert "restored" in done.out


def test_a_stock_trainer_computes_in_bfloat16_instead(tmp_path: Path) -> None:
    def work() -> int:
        module = Half()
        stock_trainer(1, tmp_path, max_epochs=1, precision="16-mixed").fit(module, loader())
        assert set(module.dtypes) == {torch.bfloat16}
        return 0

    done = run_forked(work, tmp_path)
    assert done.code == 0, done.err


def test_float16_on_cpus_rejects_other_devices() -> None:
    with pytest.raises(InputError, match=r"was used on meta: use Trainer\(precision='16-mixed'\) there"):
        Float16OnCPU().pre_backward(torch.zeros((), device="meta"), LightningModule())


_EXITS_WITH_COLLECTIVES = """
import atexit, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from lit_mnist.distributed.gather import end_collectives_at_exit

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
# The hooks of libraries may release Python's lock.
atexit._clear()
end_collectives_at_exit()

def reduce():
    return [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(8)]

if rank:
    while not (folder / "waits").exists():
        time.sleep(0.01)
    for work in reduce():
        work.wait()
else:
    reduce()
    # As on a busy machine: this thread keeps Python's lock until the interpreter ends.
    sys.setswitchinterval(60)
    (folder / "waits").touch()
    end = time.monotonic() + 2
    while time.monotonic() < end:
        pass
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_collectives_that_end_at_exit_do_not_end_the_process(tmp_path: Path) -> None:
    """Without the hook: "terminate called without an active exception"."""
    command = [sys.executable, "-W", "ignore", "-c", _EXITS_WITH_COLLECTIVES]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    errors = [rank.communicate(timeout=100)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
