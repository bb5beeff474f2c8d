"""Kills trainings at every step of two epochs, resumes them as their documentation says, and prints what is then equal.

    python -m benchmarks.resume                          all libraries, a few minutes
    python -m benchmarks.resume --only Lightning,Fabric  those whose names contain a word

Each library trains the same network on one process: 64 samples in a random order, noise that the data set draws in two
workers, dropout, momentum, a learning rate per step, and a validation after each epoch. It saves a checkpoint after
each optimizer step. A process is killed by SIGKILL at its next forward pass, and a new process resumes. A resume is
exact if it does, until the end, what the uninterrupted run did: with the same samples, noise, weights before each
forward pass, losses of the validations, and weights at the end.
"""

import argparse
import hashlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import Trainer as HFTrainer
from transformers import TrainingArguments

from lit_mnist.plugins import ExactCheckpoint, ResumableDataLoader

EPOCHS, SAMPLES, BATCH, WORKERS = 2, 64, 8, 2
STEPS = EPOCHS * SAMPLES // BATCH
_SECONDS = 120


class Event(NamedTuple):
    """A forward pass: whether it trains, the samples, digests of the inputs and the weights, and the loss."""

    trains: bool
    samples: tuple[int, ...]
    inputs: str
    weights: str
    loss: float


EVENTS: list[Event] = []


class Samples(Dataset[dict[str, torch.Tensor]]):
    """Vectors of 8 numbers with a label; those for training get noise from the global generator."""

    def __init__(self, *, noise: float) -> None:
        self.noise = noise
        self.x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Returns the vector, its label and its index."""
        x = self.x[index] + self.noise * torch.randn(8) if self.noise else self.x[index]
        return {"x": x, "labels": self.x[index, 0].gt(0).long(), "index": torch.tensor(index)}


class Net(nn.Module):
    """A network with dropout, which notes each of its forward passes and dies at one of them."""

    dies_after = STEPS + 1

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor, index: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the loss and the logits."""
        if sum(event.trains for event in EVENTS) >= self.dies_after:
            Path("killed.pickle").write_bytes(pickle.dumps(EVENTS))
            os.kill(os.getpid(), signal.SIGKILL)
        logits = self.layers(x)
        loss = nn.functional.cross_entropy(logits, labels)
        weights = digest(*self.state_dict().values())
        EVENTS.append(Event(self.training, tuple(index.tolist()), digest(x), weights, float(loss)))
        return {"loss": loss, "logits": logits}


def digest(*tensors: torch.Tensor) -> str:
    """Returns a digest of tensors."""
    return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()[:16]


def optimizers(net: nn.Module) -> tuple[Any, Any]:
    """Returns an optimizer with momentum, and a schedule per step."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (STEPS + 1))


def loaders(kind: Any = DataLoader) -> tuple[Any, Any]:
    """Returns the loaders of training and validation."""
    train = kind(Samples(noise=0.1), BATCH, shuffle=True, num_workers=WORKERS)
    return train, DataLoader(Samples(noise=0.0), BATCH)


class Module(LightningModule):
    """The network for Lightning's Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        """Returns the loss."""
        loss: torch.Tensor = self.net(**batch)["loss"]
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        """Logs the loss."""
        self.log("loss", self.net(**batch)["loss"])

    def configure_optimizers(self) -> Any:
        """Returns the optimizer and its schedule."""
        optimizer, schedule = optimizers(self)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def lightning(checkpoint: Callable[[], ModelCheckpoint], loader: Any, *, resume: bool) -> nn.Module:
    """Trains with Lightning's Trainer; resumes by `ckpt_path`."""
    seed_everything(0, verbose=False)
    path = max(Path("checkpoints").glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns) if resume else None
    module, quiet = Module(), {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=EPOCHS, num_sanity_val_steps=0, callbacks=[checkpoint()], **quiet
    )
    trainer.fit(module, *loaders(loader), ckpt_path=path)
    return module.net


def every_step() -> ModelCheckpoint:
    """Returns a ModelCheckpoint that saves after each step."""
    return ModelCheckpoint("checkpoints", save_top_k=-1, every_n_train_steps=1)


def accelerate(configuration: DataLoaderConfiguration, *, resume: bool) -> nn.Module:
    """Trains with Accelerate; resumes by `load_state`, and by `skip_first_batches` unless the loader has a state."""
    set_seed(0)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    net = Net()
    optimizer, schedule = optimizers(net)
    train, validation = loaders()
    net, optimizer, train, validation, schedule = accelerator.prepare(net, optimizer, train, validation, schedule)
    step = 0
    if resume:
        step = max(int(path.name.removeprefix("step_")) for path in Path().glob("step_*"))
        accelerator.load_state(f"step_{step}")
    first, done = divmod(step, len(train))
    for epoch in range(first, EPOCHS):
        skips = resume and epoch == first and not configuration.use_stateful_dataloader
        net.train()
        for batch in accelerator.skip_first_batches(train, done) if skips else train:
            loss = net(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            accelerator.save_state(f"step_{step}")
        net.eval()
        with torch.no_grad():
            for batch in validation:
                net(**batch)
    return accelerator.unwrap_model(net)


def hf_trainer(*, resume: bool) -> nn.Module:
    """Trains with the Trainer of Transformers; resumes by `resume_from_checkpoint`."""
    arguments = TrainingArguments(
        "checkpoints",
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        dataloader_num_workers=WORKERS,
        save_strategy="steps",
        save_steps=1,
        eval_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
    )
    set_seed(0)
    net = Net()
    trainer = HFTrainer(net, arguments, train_dataset=Samples(noise=0.1), eval_dataset=Samples(noise=0.0))
    trainer.optimizer, trainer.lr_scheduler = optimizers(net)
    trainer.train(resume_from_checkpoint=resume or None)
    return net


def fabric(*, resume: bool) -> nn.Module:
    """Trains with Fabric; resumes by `fabric.load` at the epoch of the checkpoint, as its example of a Trainer."""
    seed_everything(0, verbose=False)
    runner = Fabric(accelerator="cpu", devices=1)
    net = Net()
    optimizer, schedule = optimizers(net)
    model, optimizer = runner.setup(net, optimizer)
    train, validation = runner.setup_dataloaders(*loaders())
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "epoch": 0, "step": 0}
    if resume:
        last = max(Path().glob("step_*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
        state |= runner.load(last, {name: state[name] for name in ("model", "optimizer", "schedule")})
    for epoch in range(state["epoch"], EPOCHS):
        state["epoch"] = epoch
        model.train()
        for batch in train:
            runner.backward(model(**batch)["loss"])
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            state["step"] += 1
            runner.save(f"step_{state['step']}.ckpt", state)
        model.eval()
        with torch.no_grad():
            for batch in validation:
                model(**batch)
    return net


LIBRARIES: dict[str, Callable[..., nn.Module]] = {
    "Lightning, ModelCheckpoint": lambda **given: lightning(every_step, DataLoader, **given),
    "Lightning, ModelCheckpoint, torchdata's StatefulDataLoader": lambda **given: lightning(
        every_step, StatefulDataLoader, **given
    ),
    "Accelerate, skip_first_batches": lambda **given: accelerate(DataLoaderConfiguration(), **given),
    "Accelerate, skip_first_batches, use_seedable_sampler": lambda **given: accelerate(
        DataLoaderConfiguration(use_seedable_sampler=True), **given
    ),
    "Accelerate, use_stateful_dataloader": lambda **given: accelerate(
        DataLoaderConfiguration(use_stateful_dataloader=True), **given
    ),
    "Accelerate, use_stateful_dataloader, use_seedable_sampler": lambda **given: accelerate(
        DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True), **given
    ),
    "Transformers' Trainer": hf_trainer,
    "Fabric, as its example of a Trainer": fabric,
    "Lightning, ExactCheckpoint, ResumableDataLoader": lambda **given: lightning(
        lambda: ExactCheckpoint("checkpoints", every_n_train_steps=1), ResumableDataLoader, **given
    ),
}


class Run(NamedTuple):
    """What a process has done, and its weights at the end; empty if it was killed."""

    events: list[Event]
    weights: str


def run(library: Callable[..., nn.Module], folder: Path, *, resume: bool = False, dies_after: int = STEPS + 1) -> Run:
    """Trains in a process of its own, in a folder.

    Raises:
        RuntimeError: It failed.
    """
    folder.mkdir(exist_ok=True)
    process = multiprocessing.get_context("fork").Process(
        target=_in_process, args=(library, folder, resume, dies_after)
    )
    process.start()
    process.join(_SECONDS)
    killed = process.exitcode == -signal.SIGKILL and dies_after <= STEPS
    if process.exitcode and not killed:
        raise RuntimeError((folder / "output").read_text()[-3000:])
    if process.exitcode is None:
        process.kill()
        process.join()
        raise RuntimeError(f"it has not ended after {_SECONDS} s")
    if killed:
        return Run(pickle.loads((folder / "killed.pickle").read_bytes()), "")  # noqa: S301
    return Run(*pickle.loads((folder / "done.pickle").read_bytes()))  # noqa: S301


def _in_process(library: Callable[..., nn.Module], folder: Path, resume: bool, dies_after: int) -> None:
    os.chdir(folder)
    output = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    Net.dies_after = dies_after
    net = library(resume=resume)
    Path("done.pickle").write_bytes(pickle.dumps((EVENTS, digest(*net.state_dict().values()))))


def first_difference(whole: Run, killed: Run, resumed: Run) -> str:
    """Returns what a resumed run does otherwise than the uninterrupted one first; empty if it is exact."""
    count = len(resumed.events)
    if resumed.events == whole.events[-count:] and count >= len(whole.events) - len(killed.events):
        return "" if resumed.weights == whole.weights else "weights at the end"
    wanted, found = ([event for event in each.events if event.trains] for each in (whole, resumed))
    if len(found) > STEPS - sum(event.trains for event in killed.events) + 1:
        return "steps are repeated"
    for expected, event in zip(wanted[STEPS - len(found) :], found, strict=True):
        for name in ("samples", "inputs", "weights"):
            if getattr(event, name) != getattr(expected, name):
                return {"samples": "other samples", "inputs": "other noise"}.get(name, "other dropout or state")
    return "a validation is left out or repeated"


def main() -> None:
    """Prints the table as Markdown."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.resume", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="words, one of which is in the name of a library")
    words = parser.parse_args().only.split(",")
    names = ("torch", "lightning", "torchdata", "accelerate", "transformers")
    print(f"With {', '.join(f'{name} {version(name)}' for name in names)}:\n")
    print("| library | exact | equal weights | what differs first, and how often |\n|---|---|---|---|")
    for name, library in LIBRARIES.items():
        if not any(word in name for word in words):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            whole = run(library, Path(scratch, "whole"))
            causes, equal = Counter[str](), 0
            for step in range(1, STEPS + 1):
                print(f"{name}: killed after step {step}", file=sys.stderr, flush=True)
                killed = run(library, Path(scratch, str(step)), dies_after=step)
                if killed.events != whole.events[: len(killed.events)]:
                    raise SystemExit(f"{name}: two runs of the same program are not equal")
                resumed = run(library, Path(scratch, str(step)), resume=True)
                causes[first_difference(whole, killed, resumed)] += 1
                equal += resumed.weights == whole.weights
        exact = causes.pop("", 0)
        told = ", ".join(f"{cause} ({count})" for cause, count in causes.most_common()) or "nothing"
        print(f"| {name} | {exact} of {STEPS} | {equal} of {STEPS} | {told} |", flush=True)


if __name__ == "__main__":
    main()
