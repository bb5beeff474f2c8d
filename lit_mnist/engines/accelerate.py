"""Hugging Face Accelerate: a hand-written loop that Accelerate adapts to the processes it finds.

python -m lit_mnist.engines.accelerate --devices 2
"""

import os
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

from lit_mnist.errors import InputError
from lit_mnist.experiment import Experiment, place, run_engine
from lit_mnist.models import seed_dropout
from lit_mnist.plugins.sync_batch_norm import sync_batch_norm
from lit_mnist.raw_ddp import finish
from lit_mnist.run import Clock

_MIXED = {"bf16-mixed": "bf16", "16-mixed": "fp16"}


def train(experiment: Experiment) -> None:
    """Trains and tests in one rank."""
    # --- setup: Accelerate uses the process group of this rank
    accumulate, several = experiment.accumulate, place()[1] > 1
    if experiment.precision == "16-mixed" and experiment.device_type == "cpu":
        raise InputError("precision: Accelerate does not compute in float16 on a CPU. Use bf16-mixed or 32-true.")
    # Otherwise Accelerate chooses a number of threads by itself.
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    accelerator = Accelerator(
        cpu=experiment.device_type == "cpu", mixed_precision=_MIXED.get(experiment.precision, "no")
    )

    # --- data: the sampler has split it already; Accelerate would split a prepared loader again
    data = experiment.load_data()
    loader: Any = data.train_dataloader()
    batches, steps_per_epoch, total_steps = experiment.count(len(loader))

    # --- model and optimizer: the schedule is not prepared, because Accelerate would step it once per process
    net = experiment.make_net(accelerator.device)
    net = sync_batch_norm(net, experiment.device_type) if several else net
    model: nn.Module = accelerator.prepare_model(net)
    plain_optimizer = experiment.make_optimizer(net)
    schedule = experiment.make_schedule(plain_optimizer, total_steps)
    optimizer = accelerator.prepare_optimizer(plain_optimizer)

    # --- train
    clock, step, loss = Clock(), 0, None
    while step < total_steps:
        epoch = step // steps_per_epoch
        loader.batch_sampler.set_epoch(epoch)
        model.train()
        for number, batch in zip(range(batches), loader, strict=False):
            images, targets = experiment.move(batch)
            window = min(accumulate, batches - number + number % accumulate)
            ends_window = (number + 1) % accumulate == 0 or number + 1 == batches
            # accelerator.accumulate would learn of the end of an epoch from a prepared loader only.
            with nullcontext() if ends_window else accelerator.no_sync(model):
                seed_dropout(net, experiment.model["seed"], epoch * batches + number)
                logits = model(images)
                loss = F.cross_entropy(logits, targets, label_smoothing=experiment.model["label_smoothing"])
                accelerator.backward(loss / accumulate * (accumulate / window))
            if not ends_window:
                continue
            if experiment.clip:
                accelerator.clip_grad_norm_(model.parameters(), experiment.clip)
            optimizer.step()
            optimizer.zero_grad()
            if not accelerator.optimizer_step_was_skipped:
                schedule.step()
            step += 1
            clock.step()
            if step == total_steps:
                break

    finish(experiment, data, net, clock, step, loss)


def main(words: list[str] | None = None) -> None:
    """Runs the command."""
    run_engine("accelerate", train, words)


if __name__ == "__main__":
    main()
