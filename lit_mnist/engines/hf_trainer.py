"""The Hugging Face Trainer: it owns the loop, and each default that would change the training is set.

python -m lit_mnist.engines.hf_trainer --devices 2
"""

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

from lit_mnist.errors import InputError
from lit_mnist.experiment import Experiment, place, run_engine
from lit_mnist.models import seed_dropout
from lit_mnist.plugins.sync_batch_norm import sync_batch_norm
from lit_mnist.raw_ddp import finish
from lit_mnist.run import Clock


def train(experiment: Experiment) -> None:
    """Trains and tests in one rank."""
    # --- setup: TrainingArguments uses the process group of this rank
    world_size = place()[1]
    if experiment.precision == "16-mixed" and experiment.device_type == "cpu":
        raise InputError("precision: Accelerate does not compute in float16 on a CPU. Use bf16-mixed or 32-true.")
    # Otherwise Accelerate, in which the Trainer runs, chooses a number of threads by itself.
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    data = experiment.load_data()
    loader = _Loader(experiment, data.train_dataloader())
    arguments = TrainingArguments(
        output_dir=str(experiment.folder),
        use_cpu=experiment.device_type == "cpu",
        bf16=experiment.precision == "bf16-mixed",
        fp16=experiment.precision == "16-mixed",
        per_device_train_batch_size=experiment.data["batch_size"] // world_size,
        gradient_accumulation_steps=experiment.accumulate,
        max_steps=loader.total_steps,
        # By default, the norm of the gradient is clipped at 1.
        max_grad_norm=experiment.clip or 0.0,
        # By default, DDP looks for unused parameters, which changes the order of its sums on three or more ranks.
        ddp_find_unused_parameters=False,
        # By default, a loss that is not finite is replaced in the logs.
        logging_nan_inf_filter=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )

    # --- model and optimizer: the Trainer has schedules of its own, so it is given both
    net = experiment.make_net(arguments.device)
    net = sync_batch_norm(net, experiment.device_type) if world_size > 1 else net
    optimizer = experiment.make_optimizer(net)
    schedule = experiment.make_schedule(optimizer, loader.total_steps)

    # --- train
    clock = Clock()
    trainer = _Trainer(
        experiment,
        loader,
        model=net,
        args=arguments,
        optimizers=(optimizer, schedule),
        callbacks=[_Steps(clock)],
        # With a function here, the Trainer does not divide what compute_loss returns.
        compute_loss_func=F.cross_entropy,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()

    finish(experiment, data, net, clock, trainer.state.global_step, trainer.loss)


class _Loader:
    """The micro-batches of this rank with their numbers; the Trainer would split a DataLoader over the ranks again."""

    def __init__(self, experiment: Experiment, loader: Any) -> None:
        self.loader, self.epoch = loader, 0
        self.batches, self.steps_per_epoch, self.total_steps = experiment.count(len(loader))

    def __len__(self) -> int:
        return self.batches

    def set_epoch(self, epoch: int) -> None:
        """The Trainer calls it at the start of an epoch."""
        self.epoch = epoch
        self.loader.batch_sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number, batch in zip(range(self.batches), self.loader, strict=False):
            yield {"number": number, "batch": batch}


class _Trainer(transformers.Trainer):
    def __init__(self, experiment: Experiment, loader: _Loader, **options: Any) -> None:
        self.experiment, self.micro_batches = experiment, loader
        self.loss: torch.Tensor | None = None
        super().__init__(**options)

    def get_train_dataloader(self) -> Any:
        return self.micro_batches

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> torch.Tensor:
        """Returns the share of a micro-batch in the loss of its step."""
        experiment, batches, number = self.experiment, self.micro_batches.batches, inputs["number"]
        accumulate = experiment.accumulate
        window = min(accumulate, batches - number + number % accumulate)
        images, targets = experiment.move(inputs["batch"])
        seed_dropout(model, experiment.model["seed"], self.micro_batches.epoch * batches + number)
        self.loss = F.cross_entropy(model(images), targets, label_smoothing=experiment.model["label_smoothing"])
        return self.loss / accumulate * (accumulate / window)


class _Steps(TrainerCallback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Records the end of a step."""
        self.clock.step()


def main(words: list[str] | None = None) -> None:
    """Runs the command."""
    run_engine("hf_trainer", train, words)


if __name__ == "__main__":
    main()
