"""The short flags, the flags of single commands, and suggestions for unknown flags. Nothing here imports torch."""

from __future__ import annotations

from lit_mnist.engines.capabilities import CAPABILITIES
from lit_mnist.errors import nearest
from lit_mnist.experiment.schema import SEED, options
from lit_mnist.run.help_text import ALL

SHORT_FLAGS = {
    "--devices": "trainer.devices",
    "--epochs": "trainer.max_epochs",
    "--batch-size": "data.batch_size",
    "--lr": "model.lr",
    "--seed": SEED,
    "--precision": "trainer.precision",
    "--max-steps": "trainer.max_steps",
    "--max-restarts": "run.max_restarts",
    "--save-every": "run.save_every",
    "--keep": "run.keep",
    "--inject": "run.inject",
    "--launcher": "run.launcher",
    "--servers": "run.servers",
    "--run-dir": "run.dir",
    "--resume": "run.resume",
}
EVALUATING = ("validate", "test", "predict")
_CKPT = {"--ckpt": "run folder or checkpoint to evaluate"}
# The flags that only one command has, or few.
COMMAND_FLAGS: dict[str, dict[str, str]] = {
    "train": {},
    "fit": {},
    "validate": _CKPT,
    "test": _CKPT,
    "predict": {
        "--ckpt": "run folder or checkpoint to predict with",
        "--images": "images, or folders of them",
    },
    "compare": {
        "--engines": "all, or names separated by commas",
        "--repeats": "timed runs of each engine; 0 for none",
        "--timed-steps": "optimizer steps of a timed run",
    },
}
# Names of the same options in other projects.
SYNONYMS = {
    "learning_rate": "--lr",
    "data_dir": "--data.root",
    "root": "--data.root",
    "max_epochs": "--epochs",
    "num_epochs": "--epochs",
    "checkpoint": "--ckpt",
    "resume_from_checkpoint": "--resume",
    "num_workers": "--data.workers",
    "gpus": "--devices",
    "num_gpus": "--devices",
    "nproc_per_node": "--devices",
    "num_processes": "--devices",
    "batch": "--batch-size",
    "bs": "--batch-size",
    "epoch": "--epochs",
    "optim": "--model.optimizer",
    "arch": "--model.net",
    "network": "--model.net",
    "dataset": "--data.name",
    "clip_grad_norm": "--trainer.gradient_clip_val",
    "max_grad_norm": "--trainer.gradient_clip_val",
    "world_size": "--devices",
    "output_dir": "--run-dir",
    "default_root_dir": "--run-dir",
    "amp": "--precision",
    "fp16": "--precision",
    "accumulation_steps": "--trainer.accumulate_grad_batches",
    "gradient_accumulation_steps": "--trainer.accumulate_grad_batches",
}
_GENERAL = ("--config", "--import", "--help", "--version")
# The argument of the methods of Lightning's Trainer.
CKPT_PATH = "--ckpt_path"
# Options that `compare` sets itself, or that not every engine supports.
_NOT_COMPARED = frozenset(
    {"run.resume", "run.save_every", "run.max_restarts", "run.inject", "run.cuda_graph", "run.launcher"}
)
# Options that have no effect on an evaluation, or that its checkpoint determines.
TRAINING_ONLY = frozenset(
    {"run.resume", "run.save_every", "run.keep", "run.max_restarts", "run.inject", "run.cuda_graph"}
    | {f"trainer.{name}" for name in ("max_epochs", "max_steps", "accumulate_grad_batches", "gradient_clip_val")}
)


def options_of(command: str, engine: str) -> list[str]:
    """Returns the keys of the options that a command of an engine uses."""
    left_out = set(CAPABILITIES[engine].unsupported)
    if command == "compare":
        left_out |= _NOT_COMPARED
    elif command in EVALUATING:
        left_out |= TRAINING_ONLY | {key for key in options() if key.startswith("model.") and key != "model.compile"}
    return [key for key in options() if key not in left_out]


def unknown_flag(command: str, flag: str, engine: str, *, user: bool = False) -> str:
    """Returns the message for an unknown flag, with a suggestion if the command accepts a similar one.

    Args:
        command: The command.
        flag: The flag.
        engine: Name of the engine.
        user: Whether the request names classes of the user, which have no settings of the experiment.
    """
    others = [name for name, own in COMMAND_FLAGS.items() if flag in own]
    if others == list(EVALUATING):
        return f"--ckpt belongs to {', '.join(EVALUATING)}; to resume a training run, use --resume."
    if others:
        return f"{flag} belongs to {', '.join(others)}."
    keys = [key for key in options_of(command, engine) if not (user and key.startswith(("model.", "data.")))]
    short = [name for name, key in SHORT_FLAGS.items() if key in keys]
    known = [*short, *COMMAND_FLAGS[command], *_GENERAL, *(f"--{key}" for key in keys)]
    word = flag.lstrip("-").replace("-", "_").rpartition(".")[2]
    if word == "print_config":
        # LightningCLI has it.
        return (
            f"Unknown flag {flag}. A run writes all its settings to config.yaml in its folder; see also: fit --help all"
        )
    meant = SYNONYMS.get(word)
    if meant == "--ckpt" and command not in EVALUATING:
        meant = "--resume"
    if meant in known:
        return f"Unknown flag {flag}; did you mean {meant}?"
    # No suggestion if the nearest option is one that this command does not accept.
    hint = nearest(flag, [*known, *SHORT_FLAGS, *(f"--{key}" for key in options())])
    if hint and hint == nearest(flag, known):
        return f"Unknown flag {flag}{hint}"
    return f"Unknown flag {flag}. See: {'fit' if command == 'train' else command} --help {ALL}"
