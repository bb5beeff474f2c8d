"""Distributed data parallel training in raw PyTorch, from top to bottom.

    python -m lit_mnist.raw_ddp --devices 2                          the ranks are forked from this process
    python -m lit_mnist.raw_ddp --devices 2 --launcher spawn         each rank is a new Python process
    torchrun --standalone --nproc-per-node 2 -m lit_mnist.raw_ddp    torchrun starts the ranks
    python -m lit_mnist.raw_ddp                                      one process, without DDP: the baseline

It takes the options of `python train.py`, and trains bit-identical weights. Every rank is a process that calls `train`.
It has a copy of the whole network, and trains on its part of each batch. The copies stay equal, because every rank
takes the same step with the same gradient. Six things differ from training in one process:

(1) The ranks join a process group at the start, and leave it at the end.
(2) Batch norm uses the statistics of all ranks, and DDP averages the gradients in the backward pass.
(3) Each rank takes its part of each batch. All ranks use the same order of samples, which changes with the epoch.
(4) The loss is a mean over the ranks and micro-batches of a step. The gradients are reduced once in a step.
(5) Only rank 0 writes.
(6) The sums of an evaluation are reduced over the ranks.
"""

import csv
import math
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lit_mnist.datamodule import MNISTDataModule
from lit_mnist.errors import InputError, StoppedError
from lit_mnist.experiment import Experiment, place, run_engine
from lit_mnist.mnist import Digits, whole_batch
from lit_mnist.models import seed_dropout
from lit_mnist.plugins.checkpoint_io import read_checkpoint, write_checkpoint
from lit_mnist.plugins.failure_report import STATUS_VARIABLE, RankStatus
from lit_mnist.plugins.finite import check_finite, spread_non_finite
from lit_mnist.plugins.precision import autocast, needs_scaler
from lit_mnist.plugins.sampler import ExactDistributedSampler
from lit_mnist.plugins.stop import heeded
from lit_mnist.plugins.sync_batch_norm import sync_batch_norm
from lit_mnist.report import Mistake
from lit_mnist.run import MISTAKES_KEPT, Clock, build_result, find_mistakes, peak_memory, write_result

LOG_EVERY = 50  # steps
SAVE_EVERY = 100  # steps
STOP_EVERY = 10  # steps between two collectives in which the ranks agree whether one has received a signal


def train(experiment: Experiment) -> None:
    """Trains and tests in one rank."""
    # --- setup
    rank, world_size = place()
    device = experiment.device
    folder, precision, accumulate = experiment.folder, experiment.precision, experiment.accumulate
    status = RankStatus(Path(os.environ[STATUS_VARIABLE]), world_size) if STATUS_VARIABLE in os.environ else None

    # --- data: the batch sampler decides which samples this rank uses; it can begin within an epoch
    data = experiment.load_data()
    batch_size, workers, seed = (experiment.data[name] for name in ("batch_size", "num_workers", "seed"))
    digits = Digits(data.train, experiment.data["augment"], seed)
    sampler = ExactDistributedSampler(digits, batch_size, seed, rank=rank, world_size=world_size)  # (3)
    loader = DataLoader(digits, batch_sampler=sampler, collate_fn=whole_batch, num_workers=workers)
    batches, steps_per_epoch, total_steps = experiment.count(len(loader))

    # --- model: every rank has the same initial weights, because they depend on the seed alone
    net = experiment.make_net(device)
    model: Any = net
    if world_size > 1:
        net = sync_batch_norm(net, device.type)  # (2)
        # `net` shares its parameters with the wrapper; it is the network that is evaluated and saved.
        model = DistributedDataParallel(net, device_ids=[device] if device.type == "cuda" else None)  # (2)

    # --- optimizer: equal gradients give equal steps on all ranks
    optimizer = experiment.make_optimizer(net)
    schedule = experiment.make_schedule(optimizer, total_steps)
    scaler = GradScaler(device.type, enabled=needs_scaler(precision))

    # --- resume: every rank reads the checkpoint, which does not depend on the number of ranks
    step, best_loss, best_net = 0, math.inf, None
    if experiment.ckpt_path:
        saved = read_checkpoint(experiment.ckpt_path)
        if saved.get("engine") != "raw_ddp":
            raise InputError(
                f"ckpt_path: {experiment.ckpt_path} was not saved by raw_ddp. Resume it with python train.py."
            )
        step, best_loss, best_net = saved["step"], saved["best_loss"], saved["best_net"]
        for part, name in ((net, "net"), (optimizer, "optimizer"), (schedule, "schedule"), (scaler, "scaler")):
            part.load_state_dict(saved[name])

    def save(name: str) -> None:
        if rank != 0:  # (5)
            return
        state = {"engine": "raw_ddp", "step": step, "best_loss": best_loss, "best_net": best_net}
        state |= {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
        state |= {"schedule": schedule.state_dict(), "scaler": scaler.state_dict()}
        write_checkpoint(state, folder / "checkpoints" / name)

    def log(epoch: int, **values: float) -> None:
        if rank != 0:  # (5)
            return
        with (folder / "metrics.csv").open("a", newline="") as file:
            rows = csv.DictWriter(file, ["epoch", "step", "train_loss", "val_accuracy", "val_loss"])
            if file.tell() == 0:
                rows.writeheader()
            rows.writerow({"epoch": epoch, "step": step, **values})

    # --- train: from here on, a signal stops all ranks after the same step, once it is saved
    received: list[int] = []
    handlers = {each: signal.signal(each, lambda signum, _: received.append(signum)) for each in heeded()}
    clock, loss, losses = Clock(), None, torch.zeros((), device=device)
    last_epoch = math.ceil(total_steps / steps_per_epoch) if step < total_steps else 0
    for epoch in range(step // steps_per_epoch, last_epoch):
        first = step % steps_per_epoch * accumulate
        sampler.load_state_dict({"epoch": epoch, "start": first})  # (3)
        model.train()
        # In this order, zip reads no batch after the last.
        for number, batch in zip(range(first, batches), loader, strict=False):
            if status:
                status.update(rank, step + 1)
            images, targets = experiment.move(batch)
            window = min(accumulate, batches - number + number % accumulate)
            ends_window = (number + 1) % accumulate == 0 or number + 1 == batches
            # Gradients accumulate on each rank. The last micro-batch of a window reduces them.
            with nullcontext() if ends_window or world_size == 1 else model.no_sync():  # (4)
                seed_dropout(net, experiment.model["seed"], epoch * batches + number)
                with autocast(precision, device.type):
                    loss = F.cross_entropy(model(images), targets, label_smoothing=experiment.model["label_smoothing"])
                spread_non_finite(loss)
                share = loss / accumulate * (accumulate / window)  # (4)
                scaler.scale(share).backward()  # (4)
            losses += loss.detach()
            if not ends_window:
                continue

            scaler.unscale_(optimizer)  # (4)
            if device.type == "cpu" or step % LOG_EVERY == 0:  # on a GPU, it waits for the device
                check_finite(losses, net.parameters(), step + 1, scaler)
            losses.zero_()
            if experiment.clip:
                nn.utils.clip_grad_norm_(net.parameters(), experiment.clip)
            scale = scaler.get_scale()
            # If the gradient, which all ranks share, has overflowed, all ranks skip the step, and the schedule waits.
            scaler.step(optimizer)
            scaler.update()  # (4)
            optimizer.zero_grad()
            if scaler.get_scale() >= scale:
                schedule.step()
            step += 1
            clock.step()

            ends_epoch, ends = number + 1 == batches, step == total_steps
            if step % LOG_EVERY == 0:
                log(epoch, train_loss=loss.item())
            if ends_epoch and len(data.val):
                val, _ = evaluate(experiment, net, data.val_dataloader())
                log(epoch, val_accuracy=val["accuracy"], val_loss=val["loss"])
                if val["loss"] < best_loss:
                    best_loss, best_net = val["loss"], {name: each.clone() for name, each in net.state_dict().items()}
                    save("best.ckpt")
            stop = max(received, default=0) if world_size == 1 else 0
            if world_size > 1 and step % STOP_EVERY == 0:
                signum = torch.tensor(max(received, default=0), device=device)
                dist.all_reduce(signum, dist.ReduceOp.MAX)
                stop = int(signum)
            if ends_epoch or ends or stop or step % SAVE_EVERY == 0:
                save("last.ckpt")
            if stop:
                raise StoppedError(stop)
            if ends:
                break
    for each, handler in handlers.items():
        signal.signal(each, handler)
    finish(experiment, data, net, clock, step, loss, best_net)


def finish(
    experiment: Experiment,
    data: MNISTDataModule,
    net: nn.Module,
    clock: Clock,
    steps: int,
    loss: torch.Tensor | None,
    best_net: dict[str, torch.Tensor] | None = None,
) -> None:
    """Tests the best weights, or those of the last step, and lets rank 0 write the result."""
    rank, world_size = place()
    seconds = clock.seconds()
    weights = {name: each.cpu().clone() for name, each in net.state_dict().items()}
    if best_net:
        net.load_state_dict(best_net)
    test, mistakes = evaluate(experiment, net, data.test_dataloader())
    gathered: list[Any] = [(peak_memory(), mistakes)] * world_size
    if world_size > 1:
        dist.all_gather_object(gathered, gathered[0])
    if rank != 0:  # (5)
        return
    assert data.data
    batch_size = experiment.data["batch_size"] * experiment.accumulate
    _, steps_per_epoch, _ = experiment.count(len(data.train) // experiment.data["batch_size"])
    result = build_result(
        engine=experiment.engine,
        world_size=world_size,
        device=experiment.device,
        precision=experiment.precision,
        config=experiment.config,
        data={"name": data.data.name, "sha256": data.data.sha256},
        steps=steps,
        epochs=steps // steps_per_epoch,
        train={
            "images_per_s": clock.images_per_s(batch_size),
            "seconds": seconds,
            "loss": None if loss is None else loss.item(),
        },
        test=test,
        weights=weights,
        seconds_to_first_step=clock.seconds_to_first_step,
        peak_memory_bytes=sum(memory for memory, _ in gathered),
    )
    found = sorted((each for _, part in gathered for each in part), key=lambda mistake: -mistake.probability)
    write_result(experiment.folder, result, found[:MISTAKES_KEPT])


@torch.no_grad()
def evaluate(experiment: Experiment, net: nn.Module, loader: DataLoader[Any]) -> tuple[dict[str, Any], list[Mistake]]:
    """Returns the metrics of all samples, equal on all ranks, and the samples of this rank that were misclassified.

    Each sample is evaluated on one rank. Ranks may have different numbers of samples; no samples are padded.
    """
    classes, device = experiment.model["num_classes"], experiment.device
    confusion = torch.zeros(classes, classes, dtype=torch.int64, device=device)
    loss = torch.zeros((), dtype=torch.float64, device=device)
    mistakes: list[Mistake] = []
    net.eval()
    for batch in loader:
        images, targets = experiment.move(batch)
        with autocast(experiment.precision, device.type):
            logits = net(images)
            loss += F.cross_entropy(logits, targets) * len(targets)
        pairs = targets * classes + logits.argmax(dim=1)
        confusion += torch.bincount(pairs, minlength=classes**2).view(classes, classes)
        mistakes += find_mistakes(images, logits, targets)
    if dist.is_initialized():
        # The mean of the ranks' means would be wrong, because ranks may have different numbers of samples.
        dist.all_reduce(confusion)  # (6)
        dist.all_reduce(loss)  # (6)
    count, right = int(confusion.sum()), confusion.diagonal()
    metrics = {
        "accuracy": int(right.sum()) / count,
        "loss": loss.item() / count,
        "count": count,
        "per_class": (right / confusion.sum(dim=1).clamp(min=1)).tolist(),
        "confusion": confusion.tolist(),
    }
    return metrics, mistakes


def main(words: list[str] | None = None) -> None:
    """Starts the ranks, which join a process group, train, and leave it."""
    run_engine("raw_ddp", train, words)  # (1)


if __name__ == "__main__":
    main()
