"""The run folder: its name, its lock, `result.json`, and the summary on the terminal."""

import hashlib
import json
import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
import torchmetrics
from filelock import FileLock, Timeout
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.data import extract_batch_size

from lit_mnist.errors import InputError
from lit_mnist.mnist import PIXEL_MEAN, PIXEL_STD, Data
from lit_mnist.module import LitClassifier
from lit_mnist.plugins import ExactEvaluation
from lit_mnist.report import Mistake, write_report

WARM_UP_STEPS = 20
MISTAKES_KEPT = 40


def new_run_dir(name: str) -> Path:
    """Returns `runs/<time>-<name>`."""
    return Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"


def lock_run_dir(folder: Path) -> FileLock:
    """Creates a run folder and locks it until the end of this process.

    Raises:
        InputError: The folder cannot be written, or another run uses it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")
        lock.acquire(blocking=False)
    except Timeout as error:
        raise InputError(f"Another run uses {folder}: choose another --run-dir, or wait for its end.") from error
    except OSError as error:
        raise InputError(f"The run folder {folder} cannot be written: {error}. Choose another --run-dir.") from error
    return lock


def weights_sha256(state_dict: Mapping[str, torch.Tensor]) -> str:
    """Returns the SHA-256 of a network's weights.

    For each key in sorted order: the UTF-8 text `name|dtype|shape`, then the contiguous little-endian bytes.
    """
    digest = hashlib.sha256()
    for name in sorted(state_dict):
        tensor = state_dict[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class Clock:
    """Measures a training: seconds to the first step, the median step after the first 20, and all seconds."""

    def __init__(self) -> None:
        self.seconds_to_first_step: float | None = None
        self._ends: list[float] = []
        self._begin = time.perf_counter()

    def step(self) -> None:
        """Records the end of an optimizer step."""
        if self.seconds_to_first_step is None:
            self.seconds_to_first_step = time.time() - _STARTED
        self._ends.append(time.perf_counter())

    def images_per_s(self, batch_size: int) -> float | None:
        """Returns samples per second; None before 22 steps.

        Args:
            batch_size: Samples of an optimizer step over all ranks.
        """
        ends = self._ends[WARM_UP_STEPS:]
        if len(ends) < 2:
            return None
        return batch_size / statistics.median(b - a for a, b in pairwise(ends))

    def seconds(self) -> float:
        """Returns the seconds since the start of the training."""
        return time.perf_counter() - self._begin


def _started() -> float:
    """Returns when this process was started, or that which has forked it, in seconds since 1970."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


_STARTED = _started()


def build_result(
    *,
    engine: str,
    world_size: int,
    device: torch.device,
    precision: str,
    config: Mapping[str, Any],
    data: Mapping[str, Any] | None,
    steps: int,
    epochs: int,
    train: Mapping[str, Any] | None,
    test: Mapping[str, Any] | None,
    weights: Mapping[str, torch.Tensor],
    seconds_to_first_step: float | None,
    peak_memory_bytes: int,
) -> dict[str, Any]:
    """Returns the content of `result.json`; docs/run-folder.md describes its fields."""
    return {
        "engine": engine,
        "world_size": world_size,
        "device": f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type,
        "precision": precision,
        "config": dict(config),
        "data": data,
        "steps": steps,
        "epochs": epochs,
        "threads": torch.get_num_threads(),
        "train": train,
        "test": test,
        "weights_sha256": weights_sha256(weights) if weights else None,
        "seconds_to_first_step": seconds_to_first_step,
        "peak_memory_bytes": peak_memory_bytes,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "lightning": lightning.__version__,
            "torchmetrics": torchmetrics.__version__,
        },
        "commit": _commit(),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
    }


def write_result(folder: Path, result: Mapping[str, Any], mistakes: list[Mistake]) -> None:
    """Writes `result.json` and `report.html`, and prints the summary."""
    temporary = folder / ".result.json"
    temporary.write_text(json.dumps(result, indent=2) + "\n")
    temporary.replace(folder / "result.json")
    write_report(folder, result, mistakes)
    ranks = result["world_size"]
    lines = []
    if train := result["train"]:
        lines.append(
            f"trained   {result['steps']} steps on {ranks} rank{'s' * (ranks > 1)} ({result['device']}), "
            f"{result['precision']}, in {train['seconds']:.1f} s"
        )
    test = result["test"] or {}
    if {"accuracy", "count", "loss"} <= test.keys():
        right = round(test["accuracy"] * test["count"])
        lines.append(f"tested    {test['accuracy']:.2%} ({right} of {test['count']}), loss {test['loss']:.4f}")
    elif test:
        lines.append("tested    " + ", ".join(f"{name} {value:.4f}" for name, value in test.items()))
    lines.append(f"results   {folder / 'result.json'}, {folder / 'report.html'}")
    print("\n".join(lines), flush=True)


def peak_memory() -> int:
    """Returns this process's peak of resident memory in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def find_mistakes(images: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor) -> list[Mistake]:
    """Returns the misclassified digits of a batch.

    Args:
        images: Normalized images, [batch, 1, height, width].
        logits: [batch, classes].
        targets: Classes, int64 [batch].
    """
    probability, predicted = logits.softmax(dim=1).max(dim=1)
    rows = (predicted != targets).nonzero()[:, 0]
    pixels = (images[rows, 0] * PIXEL_STD + PIXEL_MEAN).mul(255).round().clamp(0, 255).to(torch.uint8).cpu()
    columns = (targets[rows].tolist(), predicted[rows].tolist(), probability[rows].tolist())
    found = [Mistake(image.numpy(), *each) for image, *each in zip(pixels, *columns, strict=True)]
    return _most_probable(found)


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


class RunRecorder(Callback):
    """Writes `result.json` and `report.html` into the run folder after a fit, and after a test.

    Args:
        config: The configuration, for the result.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.clock = Clock()
        self.train: dict[str, Any] | None = None
        self.test: dict[str, Any] | None = None
        self.weights: dict[str, torch.Tensor] = {}
        self.mistakes: list[Mistake] = []
        self._batch_size = self._steps = self._epochs = self._step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock."""
        self.clock, self._step = Clock(), trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Records an optimizer step."""
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            self.clock.step()
            if not self._batch_size:
                self._batch_size = extract_batch_size(batch) * trainer.world_size * trainer.accumulate_grad_batches

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keeps the weights after the last step, also of a run that was resumed at its end; the test loads the best."""
        loss = trainer.callback_metrics.get("train_loss")
        self.train = {
            "images_per_s": self.clock.images_per_s(self._batch_size),
            "seconds": self.clock.seconds(),
            "loss": None if loss is None else float(loss),
        }
        self._steps, self._epochs = trainer.global_step, trainer.current_epoch
        net = pl_module.net if isinstance(pl_module, LitClassifier) else pl_module
        tensors = ((name, value) for name, value in net.state_dict().items() if isinstance(value, torch.Tensor))
        self.weights = {name: tensor.detach().cpu().clone() for name, tensor in tensors}

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keeps the digits that were misclassified with the highest probability."""
        if isinstance(pl_module, LitClassifier) and isinstance(outputs, torch.Tensor):
            self.mistakes = _most_probable([*self.mistakes, *find_mistakes(batch[0], outputs, batch[1])])

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Computes what the module does not log: the confusion matrix and the accuracy of each class."""
        self.test = {}
        if isinstance(pl_module, LitClassifier):
            confusion = pl_module.confusion.compute()
            self.test["count"] = int(confusion.sum())
            self.test["per_class"] = pl_module.per_class.compute().tolist()
            self.test["confusion"] = confusion.tolist()
            gathered: list[Any] = [self.mistakes] * trainer.world_size
            if trainer.world_size > 1:
                dist.all_gather_object(gathered, self.mistakes)
            self.mistakes = _most_probable([mistake for part in gathered for mistake in part])

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Adds the logged metrics."""
        assert self.test is not None
        logged = {name.removeprefix("test_"): float(value) for name, value in trainer.logged_metrics.items()}
        self.test = {**logged, **self.test}

    def write(self, trainer: Trainer) -> None:
        """Writes the result; every rank must call it."""
        folder = Path(trainer.default_root_dir)
        memory = torch.tensor(peak_memory(), dtype=torch.float64, device=trainer.strategy.root_device)
        memory = trainer.strategy.reduce(memory, reduce_op="sum")
        if not trainer.is_global_zero:
            return
        data = getattr(trainer.datamodule, "data", None) if trainer.datamodule else None  # type: ignore[attr-defined]
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        reasons = [reason for each in callbacks if isinstance(each, ExactEvaluation) for reason in each.reasons]
        result = build_result(
            engine="lightning",
            world_size=trainer.world_size,
            device=trainer.strategy.root_device,
            precision=trainer.precision or "32-true",
            config=self.config,
            data={"name": data.name, "sha256": data.sha256} if isinstance(data, Data) else None,
            steps=self._steps,
            epochs=self._epochs,
            train=self.train,
            test=self.test,
            weights=self.weights,
            seconds_to_first_step=self.clock.seconds_to_first_step,
            peak_memory_bytes=int(memory),
        )
        result["exact"], result["exact_reasons"] = not reasons, reasons
        write_result(folder, result, self.mistakes)


def _most_probable(mistakes: list[Mistake]) -> list[Mistake]:
    return sorted(mistakes, key=lambda mistake: -mistake.probability)[:MISTAKES_KEPT]
