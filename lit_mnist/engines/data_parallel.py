"""nn.DataParallel: one process with a thread for each GPU, which copies the network to all GPUs in each step.

    python -m lit_mnist.engines.data_parallel --devices 2

PyTorch recommends DistributedDataParallel instead, even on one machine. Batch norm uses the statistics of each GPU
alone, and keeps the running statistics of the first. On a CPU, nn.DataParallel is the network itself, and the weights
are those of one process.
"""

from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.amp.grad_scaler import GradScaler

from lit_mnist.experiment import Experiment, run_engine
from lit_mnist.models import seed_dropout
from lit_mnist.plugins.precision import autocast, needs_scaler
from lit_mnist.raw_ddp import finish
from lit_mnist.run import Clock


def train(experiment: Experiment) -> None:
    """Trains and tests in this process, on all its GPUs."""
    # --- data: whole batches, which DataParallel splits
    kind, accumulate = experiment.device_type, experiment.accumulate
    data = experiment.load_data()
    loader: Any = data.train_dataloader()
    batches, steps_per_epoch, total_steps = experiment.count(len(loader))

    # --- model and optimizer
    net = experiment.make_net(experiment.device)
    model = nn.DataParallel(net, device_ids=list(range(experiment.ranks.devices))) if kind == "cuda" else net
    optimizer = experiment.make_optimizer(net)
    schedule = experiment.make_schedule(optimizer, total_steps)
    scaler = GradScaler(kind, enabled=needs_scaler(experiment.precision))

    # --- train
    clock, step, loss = Clock(), 0, None
    while step < total_steps:
        epoch = step // steps_per_epoch
        loader.batch_sampler.set_epoch(epoch)
        model.train()
        for number, batch in zip(range(batches), loader, strict=False):
            images, targets = experiment.move(batch)
            window = min(accumulate, batches - number + number % accumulate)
            seed_dropout(net, experiment.model["seed"], epoch * batches + number)
            with autocast(experiment.precision, kind):
                loss = F.cross_entropy(model(images), targets, label_smoothing=experiment.model["label_smoothing"])
            scaler.scale(loss / accumulate * (accumulate / window)).backward()
            if (number + 1) % accumulate and number + 1 < batches:
                continue
            scaler.unscale_(optimizer)
            if experiment.clip:
                nn.utils.clip_grad_norm_(net.parameters(), experiment.clip)
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if scaler.get_scale() >= scale:
                schedule.step()
            step += 1
            clock.step()
            if step == total_steps:
                break

    finish(experiment, data, net, clock, step, loss)


def main(words: list[str] | None = None) -> None:
    """Runs the command."""
    run_engine("data_parallel", train, words, one_process=True)


if __name__ == "__main__":
    main()
