"""The policy for the further options of Lightning's Trainer: accepted, or rejected with an alternative."""

from __future__ import annotations

from typing import Any, NamedTuple


class Policy(NamedTuple):
    """The policy for one option of Lightning's Trainer.

    Attributes:
        neutral: Values that change nothing, which are always accepted.
        reason: Why other values are rejected, and what to use instead; None if they are accepted.
        every_engine: Whether all engines accept it, not only the engine lightning.
        user: Whether the reason also holds for a user's classes, not only for the project's experiment.
    """

    neutral: tuple[Any, ...]
    reason: str | None = None
    every_engine: bool = False
    user: bool = True


_ORDER = "the samples of a step are a function of the seed and the step alone"

# Every option of Lightning's Trainer that is not in `TrainerSettings`.
POLICY = {
    # Observe.
    "logger": Policy((None,), every_engine=True),
    "callbacks": Policy((None,)),
    "profiler": Policy((None,)),
    "enable_model_summary": Policy((None,)),
    "detect_anomaly": Policy((False,)),
    "benchmark": Policy((None,)),
    "num_sanity_val_steps": Policy((None,)),
    "enable_autolog_hparams": Policy((True,)),
    "inference_mode": Policy((True,)),
    # Shorten.
    "max_time": Policy((None,)),
    "min_epochs": Policy((None,)),
    "min_steps": Policy((None,)),
    "val_check_interval": Policy((None,)),
    # Have another name here.
    "default_root_dir": Policy((None,), "all output goes to the run folder: use --run-dir"),
    "timeout": Policy((120.0,), "use --run.timeout"),
    "enable_checkpointing": Policy(
        (None, True),
        "the last checkpoint is always kept, so that a run can be resumed: see --save-every and --keep",
    ),
    # Would break a promise of every run.
    "barebones": Policy((False,), "it turns off checkpoints and metrics, which every run writes: remove it"),
    "plugins": Policy(
        (None,),
        "the precision, the batch norm and the checkpoint format are plugins already: use --precision or "
        "--trainer.sync_batchnorm",
    ),
    "model_registry": Policy((None, False), "it uploads checkpoints: remove it"),
    # Would break a promise of the experiment: all engines compute the same from the same samples.
    "exact_evaluation": Policy(
        (True,), "every evaluation of this project is exact on any number of ranks: remove it", user=False
    ),
    "gradient_clip_algorithm": Policy(
        (None,),
        "every engine clips the gradient by its norm, and all compute the same: use --trainer.gradient_clip_val",
        user=False,
    ),
    "use_distributed_sampler": Policy((True,), f"{_ORDER}: remove it", user=False),
    "reload_dataloaders_every_n_epochs": Policy((0,), f"{_ORDER}: remove it", user=False),
}
# The options of `TrainerSettings` and `RunSettings` that a run of a user's classes does not have, with the reason.
NOT_FOR_USERS = {
    "trainer.fast_dev_run": "it turns off checkpoints and loggers: use --max-steps, or trainer.limit_train_batches",
    "run.cuda_graph": "a graph is of the project's ConvNet: remove it",
    "run.servers": "parameter servers train the project's networks: remove it",
}
# The values of `trainer.strategy` for a user's classes.
STRATEGIES = ("auto", "ddp", "ddp_find_unused_parameters_true")


def is_trainer_option(key: str) -> bool:
    """Returns whether a dotted key is a further option of Lightning's Trainer, or a part of one."""
    return key.startswith("trainer.") and option_name(key) in POLICY


def option_name(key: str) -> str:
    """Returns the option of a dotted key, such as `logger` of `trainer.logger.save_dir` and `trainer.logger+`."""
    return key.partition(".")[2].partition(".")[0].removesuffix("+")
