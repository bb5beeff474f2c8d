"""A synchronous parameter server, which distributed training used before all-reduce.

    python -m lit_mnist.engines.parameter_server --devices 4

Every rank is a worker; rank 0 is the server as well. In each step, every worker sends its gradient to the server, which
waits for all of them, and sends the mean back: the synchronous form of DistBelief (Dean et al.: Large Scale Distributed
Deep Networks, 2012). The traffic of the server grows with the number of workers. In a ring all-reduce, each rank sends
less than twice the gradient. On up to two ranks, the weights are bit-identical to those of DDP. On more, the sums are
rounded in another order.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.amp.grad_scaler import GradScaler

from lit_mnist.experiment import Experiment, place, run_engine
from lit_mnist.models import seed_dropout
from lit_mnist.plugins.precision import autocast, needs_scaler
from lit_mnist.plugins.sync_batch_norm import sync_batch_norm
from lit_mnist.raw_ddp import finish
from lit_mnist.run import Clock


def train(experiment: Experiment) -> None:
    """Trains and tests in one rank."""
    # --- setup
    rank, world_size = place()
    kind, accumulate = experiment.device_type, experiment.accumulate

    # --- data
    data = experiment.load_data()
    loader: Any = data.train_dataloader()
    batches, steps_per_epoch, total_steps = experiment.count(len(loader))

    # --- model and optimizer
    net = experiment.make_net(experiment.device)
    net = sync_batch_norm(net, kind) if world_size > 1 else net
    optimizer = experiment.make_optimizer(net)
    schedule = experiment.make_schedule(optimizer, total_steps)
    scaler = GradScaler(kind, enabled=needs_scaler(experiment.precision))

    # --- train
    clock, step, loss = Clock(), 0, None
    while step < total_steps:
        epoch = step // steps_per_epoch
        loader.batch_sampler.set_epoch(epoch)
        net.train()
        for number, batch in zip(range(batches), loader, strict=False):
            images, targets = experiment.move(batch)
            window = min(accumulate, batches - number + number % accumulate)
            seed_dropout(net, experiment.model["seed"], epoch * batches + number)
            with autocast(experiment.precision, kind):
                loss = F.cross_entropy(net(images), targets, label_smoothing=experiment.model["label_smoothing"])
            scaler.scale(loss / accumulate * (accumulate / window)).backward()
            if (number + 1) % accumulate and number + 1 < batches:
                continue
            average_gradient(net, rank, world_size)
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

    if rank == 0:
        size, others = sum(each.numel() * each.element_size() for each in net.parameters()), world_size - 1
        ring = 2 * size * others // world_size
        print(f"bytes sent in a step: {size * others:,} by the server; {ring:,} by each rank of a ring all-reduce")
    finish(experiment, data, net, clock, step, loss)


def average_gradient(net: nn.Module, rank: int, world_size: int) -> None:
    """Replaces the gradient of a network by its mean over the ranks; every rank must call it."""
    gradients = [each.grad for each in net.parameters() if each.grad is not None]
    # Divided before the sum, as in DDP.
    mean = torch.cat([each.flatten() for each in gradients]) / world_size
    if rank > 0:
        dist.send(mean, 0)
        dist.recv(mean, 0)
    else:
        received = torch.empty_like(mean)
        for other in range(1, world_size):
            dist.recv(received, other)
            mean += received
        for other in range(1, world_size):
            dist.send(mean, other)
    # Copied, to keep the memory format: the norm of the gradient is summed in the order of memory.
    for gradient, part in zip(gradients, mean.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def main(words: list[str] | None = None) -> None:
    """Runs the command."""
    run_engine("parameter_server", train, words)


if __name__ == "__main__":
    main()
