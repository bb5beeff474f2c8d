"""The command line before the parser sees it: the command, the short flags, and what was probably meant."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import get_args

from lit_mnist.errors import InputError, nearest
from lit_mnist.experiment import Verb

SHORT_FLAGS = {
    "--devices": "--trainer.devices",
    "--epochs": "--trainer.max_epochs",
    "--batch-size": "--data.batch_size",
    "--lr": "--model.lr",
    "--seed": "--seed_everything",
    "--precision": "--trainer.precision",
    "--max-steps": "--trainer.max_steps",
    "--max-restarts": "--run.max_restarts",
    "--save-every": "--run.save_every",
    "--keep": "--run.keep",
    "--inject": "--run.inject",
    "--launcher": "--run.launcher",
    "--servers": "--run.servers",
    "--run-dir": "--run.dir",
    "--resume": "--run.resume",
}
EVALUATING = ("validate", "test", "predict")
_DEVICE_LIST = re.compile(r"\d+(,\d+)+,?")


@dataclass(frozen=True)
class CommandLine:
    """A command line taken apart.

    Attributes:
        verb: What to do.
        arguments: The long flags, for the parser.
        checkpoint: `--ckpt`: the run folder or checkpoint to evaluate.
        images: `--images`: the user's pictures to predict.
        resume: The run folder or checkpoint to go on from, or `auto`: that of `run_dir`, where there is one.
        run_dir: The run folder.
    """

    verb: Verb
    arguments: list[str]
    checkpoint: str | None
    images: list[str]
    resume: str | None
    run_dir: str | None

    @property
    def trains(self) -> bool:
        """Whether it asks for a training."""
        return self.verb in {"train", "fit"}


def read_command_line(argv: list[str]) -> CommandLine:
    """Takes a command line apart.

    Raises:
        InputError: The command is unknown, a flag has no value, or a short flag contradicts its long form.
    """
    verb: Verb = "train"
    if argv and not argv[0].startswith("-"):
        verbs = [name for name in get_args(Verb) if name != "train"]
        if argv[0] not in verbs:
            if argv[0] == "compare":
                raise InputError("compare comes first, and is train.py's own: python train.py compare ...")
            if argv[0] == "bench":
                raise InputError("The benchmarks run from a checkout: python -m benchmarks")
            known = [*verbs, "compare"]
            instead = nearest(argv[0], known) or f": use {', '.join(known)}."
            raise InputError(f"Unknown command {argv[0]!r}{instead}")
        verb, argv = argv[0], argv[1:]  # type: ignore[assignment]
    pairs, images = _pairs(argv)
    checkpoints = [value for flag, value in pairs if flag == "--ckpt"]
    if checkpoints and verb not in EVALUATING:
        raise InputError(f"--ckpt belongs to {', '.join(EVALUATING)}; to go on with a training, use --resume.")
    if images and verb != "predict":
        raise InputError("--images belongs to predict.")
    if verb in EVALUATING and any(SHORT_FLAGS.get(flag, flag) == "--run.resume" for flag, _ in pairs):
        raise InputError(f"--resume goes on with a training; {verb} takes --ckpt.")
    arguments, given = [], dict[str, tuple[str, str]]()
    for flag, value in pairs:
        if flag == "--ckpt":
            continue
        name = SHORT_FLAGS.get(flag, flag)
        if value is None:
            arguments.append(name)
            continue
        if name in SHORT_FLAGS.values():
            earlier, other = given.setdefault(name, (flag, value))
            if value != other:
                raise InputError(f"{flag} {value} contradicts {earlier} {other}: give one of them.")
        is_list = name == "--trainer.devices" and _DEVICE_LIST.fullmatch(value)
        arguments.append(f"{name}=[{value.rstrip(',')}]" if is_list else f"{name}={value}")
    return CommandLine(
        verb=verb,
        arguments=arguments,
        checkpoint=checkpoints[-1] if checkpoints else None,
        images=images,
        resume=given.get("--run.resume", ("", None))[1],
        run_dir=given.get("--run.dir", ("", None))[1],
    )


def _pairs(argv: list[str]) -> tuple[list[tuple[str, str | None]], list[str]]:
    """Returns flags with their values, and the values of `--images`."""
    pairs: list[tuple[str, str | None]] = []
    images: list[str] = []
    rest = list(argv)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("-"):
            raise InputError(f"{flag!r} is no flag: a value follows the flag that it belongs to.")
        flag, _, value = flag.partition("=")
        if flag.endswith("+") and not flag.startswith("--trainer.callbacks"):
            raise InputError(f"{flag} is not taken: give the whole value to {flag[:-1]}.")
        values = [value] if _ else []
        while rest and not _ and not _is_flag(rest[0]) and (flag == "--images" or not values):
            values.append(rest.pop(0))
        if flag == "--images":
            images += values
        takes_value = flag in SHORT_FLAGS or flag in {"--ckpt", "--images"}
        if (takes_value and not values) or "" in values:
            raise InputError(f"{flag} needs a value.")
        if flag != "--images":
            pairs.append((flag, values[0] if values else None))
    return pairs, images


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-\d+(\.\d+)?", word)
