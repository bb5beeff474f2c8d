"""The Python classes under a Trainer of the user's own: Lightning's, or the project's."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import Program, flipped, on_ranks, result_of, run_forked
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision, TorchCheckpointIO, TorchSyncBatchNorm
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from lightning_utilities.core import rank_zero
from torch.utils.data import DataLoader, TensorDataset

from lit_mnist.checkpoint.digest import weights_sha256
from lit_mnist.data.dataset import Split, load_dataset
from lit_mnist.data.loader import normalize
from lit_mnist.datamodule import MNISTDataModule
from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.sample_order import train_indices
from lit_mnist.errors import InputError
from lit_mnist.experiment import DataSettings, ModelSettings
from lit_mnist.experiment.learning_rate import peak_lr
from lit_mnist.module import LitClassifier
from lit_mnist.plugins.strategy import SafeDDPStrategy
from lit_mnist.trainer import LitTrainer
from lit_mnist.training.schedule import lr_factor

TRAINERS: dict[str, type[Trainer]] = {"Lightning's": Trainer, "the project's": LitTrainer}
BATCH, SAMPLES = 64, 640
FEW = {"train_size": SAMPLES, "val_size": 200, "test_size": 2001}


def trainer_of(kind: type[Trainer], folder: Path, ranks: int = 1, **options: Any) -> Trainer:
    """Returns a Trainer on CPUs that shows and writes nothing, but for what the options say."""
    several = {"strategy": "ddp", **({"plugins": [TorchElasticEnvironment()]} if kind is Trainer else {})}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {**quiet, "enable_checkpointing": False, "precision": "32-true", **options}
    return kind(accelerator="cpu", devices=ranks, default_root_dir=folder, **(several if ranks > 1 else {}), **options)


def in_fork(folder: Path, work: Callable[[], None], timeout: float = 120) -> str:
    """Runs `work` in a forked process, whose errors are the test's; returns what it prints."""

    def start() -> int:
        os.chdir(folder)
        work()
        return 0

    done = run_forked(start, folder, timeout)
    assert done.code == 0, done.out + done.err
    return done.out + done.err


class Seen(Callback):
    """Notes the samples of each micro-batch, by epoch, and writes them where all ranks can be compared."""

    def __init__(self, path: Path, indices: Callable[[Any], torch.Tensor]) -> None:
        self.path, self.indices = path, indices
        self.epochs: dict[int, list[list[int]]] = {}

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.epochs.setdefault(trainer.current_epoch, []).append(self.indices(batch).tolist())

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        weights = weights_sha256(module.state_dict())
        self.path.with_suffix(f".{trainer.global_rank}").write_text(json.dumps([self.epochs, weights]))


def seen_of(path: Path, ranks: int) -> list[list[list[int]]]:
    """Returns the samples of each epoch's micro-batches over all ranks, which have ended with the same weights."""
    parts = [json.loads(path.with_suffix(f".{rank}").read_text()) for rank in range(ranks)]
    assert len({weights for _, weights in parts}) == 1
    epochs = [[part[0][epoch] for part in parts] for epoch in sorted(parts[0][0], key=int)]
    return [[list(chain(*shares)) for shares in zip(*epoch, strict=True)] for epoch in epochs]


RELOADS = [{}, {"use_distributed_sampler": False, "reload_dataloaders_every_n_epochs": 1}]


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        pytest.param(kind, ranks, marks=() if (kind, ranks) == ("the project's", 2) else pytest.mark.slow)
        for kind in TRAINERS
        for ranks in (1, 2)
    ],
)
def test_each_epoch_has_an_order_of_its_own(tmp_path: Path, kind: str, ranks: int) -> None:
    """That of (seed, epoch), each sample once, whatever the Trainer is told of its loaders."""

    def work(rank: Rank) -> None:
        for number, options in enumerate(RELOADS):
            seen = Seen(tmp_path / f"seen-{number}", lambda batch: batch.indices)
            trainer = trainer_of(TRAINERS[kind], tmp_path, ranks, max_epochs=3, callbacks=[seen], **options)
            trainer.fit(LitClassifier(), datamodule=MNISTDataModule(**FEW))

    on_ranks(work, tmp_path, ranks)
    expected = [
        [train_indices(42, epoch, batch, count=SAMPLES, batch_size=BATCH).tolist() for batch in range(10)]
        for epoch in range(3)
    ]
    assert all(sorted(chain(*epoch)) == list(range(SAMPLES)) for epoch in expected)
    assert expected[0] != expected[1] != expected[2]
    for number in range(len(RELOADS)):
        assert seen_of(tmp_path / f"seen-{number}", ranks) == expected


class Own(LightningModule):
    """What a user may have written."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return F.mse_loss(self.layer(batch[0] / 100), batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def test_a_user_s_loader_is_sharded_as_by_lightning_s_trainer(tmp_path: Path) -> None:
    def work(rank: Rank) -> None:
        for number, kind in enumerate(TRAINERS.values()):
            loader = DataLoader(TensorDataset(torch.arange(32.0).unsqueeze(1)), batch_size=4, shuffle=True)
            seen = Seen(tmp_path / f"seen-{number}", lambda batch: batch[0][:, 0].int())
            trainer_of(kind, tmp_path, 2, max_epochs=2, callbacks=[seen]).fit(Own(), loader)

    on_ranks(work, tmp_path, 2)
    stock, own = (seen_of(tmp_path / f"seen-{number}", 2) for number in range(len(TRAINERS)))
    assert own == stock
    assert [sorted(chain(*epoch)) for epoch in own] == [list(range(32))] * 2
    assert own[0] != own[1]


def last_rate(peak: float, steps: int) -> float:
    """Returns the learning rate of the last step of a one-cycle schedule of so many."""
    settings = ModelSettings(lr=peak)
    return peak_lr(settings, 1, steps) * lr_factor(settings, steps - 1, steps)


SHORTER: dict[str, tuple[dict[str, Any], int, int | None]] = {
    # Options; the steps that they leave; the samples of the validation.
    "the sanity check": ({"max_epochs": 1, "limit_train_batches": 2}, 2, 5000),
    "max_steps": ({"max_steps": 3}, 3, None),
    "limit_val_batches": ({"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 2}, 2, 2000),
    "limit_train_batches": ({"max_epochs": 2, "limit_train_batches": 0.005, "limit_val_batches": 1}, 8, 1000),
    "a shorter last step": (
        {"max_epochs": 1, "limit_train_batches": 5, "accumulate_grad_batches": 4, "limit_val_batches": 1},
        2,
        1000,
    ),
    "fast_dev_run": ({"fast_dev_run": 2}, 2, 2000),
    "no validation": ({"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 0}, 2, None),
    "overfit_batches": ({"max_epochs": 2, "overfit_batches": 2}, 4, 2000),
}


@pytest.mark.parametrize("kind", TRAINERS)
@pytest.mark.slow
def test_a_shorter_training_of_the_real_data_reaches_its_end(tmp_path: Path, kind: str) -> None:
    """And its one-cycle schedule comes down to the rate of its own last step; one data module serves them all."""

    def work() -> None:
        data = MNISTDataModule()
        for name, (options, steps, count) in SHORTER.items():
            module, seen = LitClassifier(lr=0.02), Seen(tmp_path / "seen", lambda batch: batch.indices)
            trainer = trainer_of(TRAINERS[kind], tmp_path, callbacks=[seen], **options)
            trainer.fit(module, datamodule=data)
            assert trainer.global_step == steps, name
            assert (module.metrics.last.count if module.metrics.last else None) == count, name
            assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(last_rate(0.02, steps)), name
            first, last = seen.epochs[0], seen.epochs[max(seen.epochs)]
            assert (first == last) == (max(seen.epochs) == 0 or name == "overfit_batches"), name

    in_fork(tmp_path, work)


def test_a_trainer_without_a_length_trains_the_default_recipe_s_one_epoch(tmp_path: Path) -> None:
    def work() -> None:
        trainer = trainer_of(LitTrainer, tmp_path)
        trainer.fit(LitClassifier(), datamodule=MNISTDataModule(**FEW))
        assert (trainer.current_epoch, trainer.global_step) == (1, 10)
        endless = trainer_of(Trainer, tmp_path, max_epochs=-1)
        with pytest.raises(InputError, match="max_epochs or max_steps"):
            endless.fit(LitClassifier(), datamodule=MNISTDataModule(**FEW))

    in_fork(tmp_path, work)


@pytest.mark.parametrize("kind", TRAINERS)
def test_the_gradients_of_all_epochs_are_made_under_a_schedule_of_accumulation(tmp_path: Path, kind: str) -> None:
    """A position in the epoch is a resumed one only in the epoch that is resumed."""

    def work() -> None:
        seen = Seen(tmp_path / "seen", lambda batch: batch.indices)
        callbacks = [seen, GradientAccumulationScheduler({1: 2})]
        trainer = trainer_of(TRAINERS[kind], tmp_path, max_epochs=3, callbacks=callbacks)
        trainer.fit(LitClassifier(schedule="constant"), datamodule=MNISTDataModule(**FEW))
        assert trainer.global_step == 10 + 5 + 5

    in_fork(tmp_path, work)
    assert [sorted(chain(*epoch)) for epoch in seen_of(tmp_path / "seen", 1)] == [list(range(SAMPLES))] * 3


@pytest.mark.parametrize("kind", [pytest.param("Lightning's", marks=pytest.mark.slow), "the project's"])
def test_a_training_resumed_within_an_epoch_ends_with_the_same_weights(tmp_path: Path, kind: str) -> None:
    def work() -> None:
        def fit(path: Path | None = None, **options: Any) -> str:
            module = LitClassifier(net="basicnet", lr=0.01)
            trainer = trainer_of(TRAINERS[kind], tmp_path, max_epochs=2, **options)
            data = MNISTDataModule(**{**FEW, "train_size": 320})
            trainer.fit(module, datamodule=data, ckpt_path=path, weights_only=True)
            assert trainer.global_step == 10
            return weights_sha256(module.net.state_dict())

        saved = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        whole = fit(callbacks=[saved], enable_checkpointing=True)
        for step in (2, 5, 7):
            assert fit(tmp_path / f"step={step}.ckpt") == whole, step

    assert "not resumable" not in in_fork(tmp_path, work)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_metrics_are_exact_and_returned(tmp_path: Path, ranks: int) -> None:
    """Of all samples, also where the ranks have unequal parts; of a limited evaluation, of those that it has seen."""

    def work(rank: Rank) -> None:
        found = []
        for kind in TRAINERS.values():
            for limit in (1.0, 1):
                module, data = LitClassifier(), MNISTDataModule(eval_batch_size=700, **FEW)
                trainer = trainer_of(kind, tmp_path, ranks, limit_test_batches=limit)
                metrics = trainer.test(module, datamodule=data, verbose=False)
                tested = module.metrics.last
                assert tested
                assert metrics == [{"test_loss": tested.loss, "test_accuracy": tested.accuracy}]
                validated = trainer.validate(module, datamodule=data, verbose=False)
                validation = module.metrics.last
                assert validation
                assert not isinstance(trainer, LitTrainer) or trainer.inexact_evaluation == []
                assert validated == [{"val_loss": validation.loss, "val_accuracy": validation.accuracy}]
                found.append((tested.count, tested.accuracy, validation.count))
        (tmp_path / f"found.{rank.rank}").write_text(json.dumps(found))

    on_ranks(work, tmp_path, ranks)
    accuracies = []
    for rank in range(ranks):
        whole, part, *others = json.loads((tmp_path / f"found.{rank}").read_text())
        assert others == [whole, part]
        assert (whole[0], whole[2], part[0], part[2]) == (2001, 200, 700 * ranks, 200)
        accuracies += [whole[1], part[1]]
    images = load_dataset(DataSettings()).test
    assert isinstance(images, Split)
    net = LitClassifier().net.eval()
    with torch.no_grad():
        right = net(normalize(images.images[:2001].unsqueeze(1).float())).argmax(dim=1) == images.labels[:2001]
    # Of two ranks the second begins with sample 1000.
    seen = torch.cat([right[start : start + 700] for start in (0, 1000)[:ranks]])
    assert accuracies == [float(right.sum()) / 2001, float(seen.sum()) / len(seen)] * ranks


@cache
def pairs(count: int, split: str = "train") -> TensorDataset:
    """Returns images and targets as a user may have them."""
    data: Any = getattr(load_dataset(DataSettings()), split)
    return TensorDataset(normalize(data.images[:count].unsqueeze(1).float()), data.labels[:count])


def given_plugins() -> None:
    """Builds Trainers of two ranks with plugins and strategies of the user's own."""
    trainer = LitTrainer(accelerator="cpu", devices=2, plugins=MixedPrecision("bf16-mixed", "cpu"))
    assert type(trainer.precision_plugin) is MixedPrecision
    assert isinstance(trainer.strategy, SafeDDPStrategy)
    own: list[Any] = [TorchCheckpointIO(), TorchSyncBatchNorm(), LightningEnvironment()]
    strategy: Any = LitTrainer(accelerator="cpu", devices=2, plugins=own, precision="32-true").strategy
    assert [strategy.checkpoint_io, strategy._layer_sync, strategy.cluster_environment] == own
    strategy = LitTrainer(accelerator="cpu", devices=2, strategy="ddp_find_unused_parameters_true").strategy
    assert type(strategy) is DDPStrategy
    assert strategy._ddp_kwargs["find_unused_parameters"] is True
    with pytest.raises(InputError, match="precision is given twice: as 32-true"):
        LitTrainer(accelerator="cpu", plugins=[MixedPrecision("bf16-mixed", "cpu")], precision="32-true")


def test_plugins_and_strategies_of_the_user_replace_the_trainer_s(tmp_path: Path) -> None:
    in_fork(tmp_path, given_plugins)


def test_loading_weights_never_runs_their_code(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="weights_only=False is not available"):
        LitClassifier.load_from_checkpoint(tmp_path, weights_only=False)


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [("Lightning's", 1), ("Lightning's", 2), ("the project's", 2)],
)
@pytest.mark.slow
def test_a_user_s_own_pairs_train_and_are_evaluated(tmp_path: Path, kind: str, ranks: int) -> None:
    train, test = pairs(800), pairs(300, "test")

    def work(rank: Rank) -> None:
        data = MNISTDataModule(**FEW)
        for net in ("convnet", "basicnet"):
            module = LitClassifier(net=net, lr=0.02)
            trainer = trainer_of(TRAINERS[kind], tmp_path, ranks, max_epochs=2)
            trainer.fit(module, DataLoader(train, batch_size=20, shuffle=True), DataLoader(test, batch_size=50))
            steps = 80 // ranks
            assert trainer.global_step == steps
            assert module.metrics.last
            assert module.metrics.last.count == 300
            assert module.metrics.last.accuracy > 0.5
            assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(last_rate(0.02, steps))
            # A data module that was used before says nothing about these.
            trainer.test(module, datamodule=data, verbose=False)
            metrics = trainer.test(module, DataLoader(test, batch_size=50), verbose=False)
            assert metrics[0]["test_accuracy"] == module.metrics.last.accuracy

    on_ranks(work, tmp_path, ranks)


def test_batches_of_another_form_are_rejected_by_a_message(tmp_path: Path) -> None:
    def work() -> None:
        loader = DataLoader(pairs(20), batch_size=10, collate_fn=lambda rows: {"image": 1})
        with pytest.raises(InputError, match=r"\(images, targets\), but is a dict"):
            trainer_of(Trainer, tmp_path, max_epochs=1).fit(LitClassifier(), loader)
        predicted = trainer_of(Trainer, tmp_path).predict(LitClassifier(), DataLoader(pairs(20)[:][0], batch_size=10))
        assert predicted
        assert [len(classes) for _, classes, _ in predicted] == [10, 10]

    in_fork(tmp_path, work)


def test_a_data_module_gives_its_loaders_without_a_trainer(tmp_path: Path) -> None:
    def work() -> None:
        data = MNISTDataModule()
        data.setup("fit")
        loader = data.train_dataloader()
        assert len(loader) == 859
        orders = []
        for epoch in range(2):
            loader.set_epoch(epoch)
            orders.append(torch.cat([batch.indices for batch in loader]))
            assert len(orders[epoch].unique()) == 859 * 64
        assert not torch.equal(*orders)
        assert sum(len(batch.targets) for batch in data.val_dataloader()) == 5000
        assert sum(len(batch.targets) for batch in data.test_dataloader()) == 10_000
        assert sum(len(batch.targets) for batch in data.predict_dataloader()) == 10_000

    in_fork(tmp_path, work)


def test_what_fills_no_batch_is_told_once(tmp_path: Path) -> None:
    def work() -> None:
        # Other tests of this process may have imported another of Lightning's packages, and silenced the logger.
        log = rank_zero.log
        logging.disable(logging.NOTSET)
        log.disabled = False
        log.setLevel(logging.INFO)
        log.addHandler(logging.StreamHandler())
        trainer = trainer_of(Trainer, tmp_path, max_epochs=2)
        trainer.fit(LitClassifier(), datamodule=MNISTDataModule(**{**FEW, "train_size": 650}))

    assert in_fork(tmp_path, work).count("10 samples of each epoch") == 1


@pytest.mark.slow
def test_what_a_trainer_saves_is_evaluated_by_the_command(tmp_path: Path, program: Program) -> None:
    """It carries no hash: this is told, and no run resumes from it."""
    path = tmp_path / "own.ckpt"

    def work() -> None:
        module, data = LitClassifier(net="basicnet", lr=0.02), MNISTDataModule(train_size=SAMPLES, test_size=500)
        # Their states are in the file, too.
        callbacks = [EarlyStopping("val_loss"), ModelCheckpoint(monitor="val_accuracy", mode="max")]
        options: dict[str, Any] = {"callbacks": callbacks, "enable_checkpointing": True, "limit_val_batches": 1}
        trainer = trainer_of(Trainer, tmp_path, max_epochs=2, **options)
        trainer.fit(module, datamodule=data)
        trainer.save_checkpoint(path)
        (tmp_path / "metrics.json").write_text(json.dumps(trainer.test(module, datamodule=data, verbose=False)[0]))
        with pytest.warns(UserWarning, match="no SHA-256"):
            loaded = LitClassifier.load_from_checkpoint(path)
        assert weights_sha256(loaded.state_dict()) == weights_sha256(module.state_dict())

    in_fork(tmp_path, work)
    expected = json.loads((tmp_path / "metrics.json").read_text())
    few = ("--data.test_size", 500, "--precision", "32-true")
    for engine, ranks in (("lightning", 1), ("raw_ddp", 2), ("single", 1)):
        folder = tmp_path / engine
        done = program("test", "--ckpt", path, "--devices", ranks, *few, "--run-dir", folder, engine=engine)
        assert done.code == 0, done.err
        assert done.out.count("no SHA-256") == 1
        test = result_of(folder)["test"]
        assert test["accuracy"] == pytest.approx(expected["test_accuracy"])
        assert test["loss"] == pytest.approx(expected["test_loss"])
    assert program("validate", "--ckpt", path, *few, "--data.val_size", 100, "--run-dir", tmp_path / "v").code == 0
    done = program("test", "--ckpt", path, "--model.net", "convnet")
    assert (done.code, "model.net is convnet here, but basicnet" in done.err) == (2, True), done.err
    done = program("--resume", path)
    assert (done.code, "own.ckpt" in done.err, "ckpt_path" in done.err) == (2, True, True), done.err
    content = path.read_bytes()
    path.write_bytes(flipped(content, content.index(b"hyper_parameters") + 2))
    assert program("test", "--ckpt", path).code == 2
