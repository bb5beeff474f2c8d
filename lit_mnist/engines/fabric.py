"""Lightning Fabric: a hand-written loop, on the devices, processes and precision that Fabric sets up.

python -m lit_mnist.engines.fabric --devices 2
"""

from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.plugins import DoublePrecision, MixedPrecision, Precision
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.fabric.strategies.ddp import DDPStrategy

from lit_mnist.experiment import Experiment, place, run_engine
from lit_mnist.models import seed_dropout
from lit_mnist.plugins.sync_batch_norm import sync_batch_norm
from lit_mnist.raw_ddp import finish
from lit_mnist.run import Clock


def train(experiment: Experiment) -> None:
    """Trains and tests in one rank."""
    # --- setup: Fabric uses the process group of this rank
    kind, accumulate, several = experiment.device_type, experiment.accumulate, place()[1] > 1
    precision: Precision = Precision()
    if experiment.precision == "64-true":
        precision = DoublePrecision()
    elif experiment.precision in ("16-mixed", "bf16-mixed"):
        # Fabric(precision="16-mixed") rejects float16 on a CPU.
        precision = MixedPrecision(experiment.precision, device=kind)
    fabric = Fabric(
        accelerator=kind,
        devices=experiment.ranks.devices,
        strategy=DDPStrategy() if several else "auto",
        # Without a choice, Fabric reads the variables of a Slurm job.
        plugins=[precision, TorchElasticEnvironment() if several else LightningEnvironment()],
    )
    fabric.launch()

    # --- data: the sampler has split it already, so Fabric does not set up the loader
    data = experiment.load_data()
    loader: Any = data.train_dataloader()
    batches, steps_per_epoch, total_steps = experiment.count(len(loader))

    # --- model and optimizer
    net = experiment.make_net(fabric.device)
    net = sync_batch_norm(net, kind) if several else net
    # Fabric converts the outputs of a network to torch's default dtype, which would round its logits.
    torch.set_default_dtype(experiment.dtype)
    model = fabric.setup_module(net)
    plain_optimizer = experiment.make_optimizer(net)
    schedule = experiment.make_schedule(plain_optimizer, total_steps)
    optimizer: Any = fabric.setup_optimizers(plain_optimizer)
    scaler = getattr(precision, "scaler", None)

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
            with fabric.no_backward_sync(model, enabled=several and not ends_window):
                seed_dropout(net, experiment.model["seed"], epoch * batches + number)
                logits = model(images)
                loss = F.cross_entropy(logits, targets, label_smoothing=experiment.model["label_smoothing"])
                # Fabric scales the loss for float16, but does not divide it by the micro-batches.
                fabric.backward(loss / accumulate * (accumulate / window), model=model)
            if not ends_window:
                continue
            if experiment.clip:
                # By default, Fabric raises if a gradient has overflowed, before the scaler can skip the step.
                fabric.clip_gradients(model, optimizer, max_norm=experiment.clip, error_if_nonfinite=False)
            scale = scaler.get_scale() if scaler else 1.0
            optimizer.step()
            optimizer.zero_grad()
            if not scaler or scaler.get_scale() >= scale:
                schedule.step()
            step += 1
            clock.step()
            if step == total_steps:
                break

    finish(experiment, data, net, clock, step, loss)


def main(words: list[str] | None = None) -> None:
    """Runs the command."""
    run_engine("fabric", train, words)


if __name__ == "__main__":
    main()
