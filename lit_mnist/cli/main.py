"""The entry point of the command line. A rejected command line and `--help` do not import torch.

python train.py --devices 2                    train, then test the best weights
python train.py fit --config configs/seed.yaml --trainer.max_epochs 1
python train.py test --ckpt runs/20260101-120000-convnet
python train.py predict --ckpt runs/20260101-120000-convnet --images my-digits/
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lit_mnist.cli.entry import prepare
from lit_mnist.cli.help import help_text
from lit_mnist.cli.request import parse
from lit_mnist.cli.words import split_command
from lit_mnist.distributed.rank import (
    Rank,
    adopt_slurm,
    check_ranks_environment,
    die_with_parent,
    launched_from_outside,
)
from lit_mnist.distributed.signals import STOP, require_main_thread
from lit_mnist.distributed.terminal import clear_bar, guard_streams, print_error, print_failure, print_line
from lit_mnist.engines.capabilities import CAPABILITIES, check_engine
from lit_mnist.errors import InputError, LitMnistError, RankLostError, nearest
from lit_mnist.run.imports import split_imports


class CommandLine(NamedTuple):
    """What was typed.

    Attributes:
        words: The words after the program.
        engine: Name of the engine.
        typed: The whole line, for the result.
    """

    words: list[str]
    engine: str
    typed: str


class Command(NamedTuple):
    """A command.

    Attributes:
        help: What it does.
        run: Runs it, and returns its exit code.
        engines: The engines that have it; None if `CAPABILITIES` says which.
        parses: Whether it is a package of its own, which parses its words and has its own help.
    """

    help: str
    run: Callable[[CommandLine], int]
    engines: tuple[str, ...] | None = None
    parses: bool = False


def _run(line: CommandLine) -> int:
    request = parse(line.words, line.engine)
    check_engine(line.engine, request.command, request.settings, request.options_of_lightning)
    request.check()
    from lit_mnist.cli.run import run

    run(request, line.engine, line.typed)
    return 0


def _compare(line: CommandLine) -> int:
    request = parse(line.words, line.engine)
    experiment = request.experiment()
    if request.options:
        raise InputError(f"trainer.{request.options[0]} is an option of Lightning alone: remove it.")
    from lit_mnist.comparison.command import compare

    return compare(experiment, request.settings, request.flags, imports=request.imports, typed=line.typed, main=main)


def _doctor(line: CommandLine) -> int:
    from ddp_doctor.command import main as doctor

    return doctor(line.words[1:])


def _new(line: CommandLine) -> int:
    from lit_mnist.cli.new import help_of_new, run_new

    if text := help_of_new(line.words[1:], Path(sys.argv[0]).name):
        print_line(text)
        return 0
    return run_new(line.words[1:])


def _export(line: CommandLine) -> int:
    from lit_mnist.export.main import main as export

    return export(line.words[1:], Path(sys.argv[0]).name)


# A command of this table that parses its words gets them as they are.
COMMANDS = {
    "train": Command("fit, then test the best weights exactly; the default command", _run),
    "fit": Command("train, without the test", _run),
    "validate": Command("evaluate on the validation split", _run),
    "test": Command("evaluate on the test split", _run),
    "predict": Command("predict the test split, or your own images", _run),
    "compare": Command("train with several engines, and compare their results and costs", _compare, ("lightning",)),
    "new": Command("write a small complete project into a new folder", _new, ("lightning",), parses=True),
    "doctor": Command("examine another training run for silent faults", _doctor, ("lightning",), parses=True),
    "export": Command("write the network of a run as safetensors, ONNX or pt2", _export, ("lightning",), parses=True),
}


def main(argv: list[str] | None = None, engine: str = "lightning") -> int:
    """Runs a command and returns its exit code.

    Args:
        argv: The arguments; by default those of the process.
        engine: Name of the engine.
    """
    guard_streams()
    words = sys.argv[1:] if argv is None else argv
    outside, code = False, 0
    if words[:1] == ["--complete"]:
        from ddp_doctor.command import complete as complete_doctor
        from lit_mnist.cli.completion import proposals, typed_words

        for word in proposals(*typed_words(), _commands_of(engine), engine, complete_doctor):
            print_line(word)
        return 0
    if words[:1] == ["doctor"] and engine == "lightning":
        return _doctor(CommandLine(words, engine, ""))
    try:
        name = _name(words)
        parses = name in COMMANDS and COMMANDS[name].parses
        if not parses and (text := help_text(words, engine, _commands_of(engine))):
            print_line(text)
            return 0
        from lit_mnist.cli.versions import check_versions

        guard_streams(lambda text: print_error(f"warning: This command {text}"))
        check_versions()
        require_main_thread()
        STOP.listen()
        adopt_slurm()
        check_ranks_environment()
        outside = launched_from_outside()
        if outside:
            die_with_parent()
        typed = sys.orig_argv if argv is None else [sys.argv[0], *argv]
        line = CommandLine(list(words), engine, shlex.join([Path(typed[0]).name, *typed[1:]]))
        code = _command(name, engine).run(line)
    except LitMnistError as error:
        code = error.exit_code
        if outside and code != RankLostError.exit_code and not _reports(error):
            # Another rank prints the same message. The launcher kills it as soon as this rank ends.
            time.sleep(1)
        else:
            _print(error)
    if outside and code:
        # Skip the clean-up: ranks that wait for this one are released only when it ends.
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    return code


def _name(words: Sequence[str]) -> str:
    """Returns the command, which may follow `--import`."""
    return split_command(split_imports(words)[1] if words and words[0].startswith("--import") else words)[0]


def _command(name: str, engine: str) -> Command:
    """Returns a command that an engine has.

    Raises:
        InputError: There is no such command, or the engine does not have it.
    """
    if name == "bench":
        raise InputError("The benchmarks run from a checkout: python -m benchmarks")
    if name not in COMMANDS:
        known = [*_commands_of(engine), "--help"] if name == "help" else list(_commands_of(engine))
        raise InputError(f"Unknown command {name!r}{nearest(name, known) or ': use ' + ', '.join(known) + '.'}")
    command = COMMANDS[name]
    if command.engines and engine not in command.engines:
        raise InputError(f"Only train.py has the command {name}: python train.py {name} ...")
    return command


def _commands_of(engine: str) -> dict[str, str]:
    """Returns the commands that an engine has, with what they do."""
    return {
        name: command.help
        for name, command in COMMANDS.items()
        if engine in (command.engines or [each for each in CAPABILITIES if name in CAPABILITIES[each].commands])
    }


def _reports(error: LitMnistError) -> bool:
    """Returns whether this rank prints an error that all ranks have: rank 0, and before the start local rank 0."""
    rank = Rank.from_environment()
    return rank.is_first if error.started else rank.local_rank == 0


def _print(error: LitMnistError) -> None:
    if not error.started:
        print_failure(error)
        return
    from lit_mnist.distributed.rank_status import RANK_STATUS

    if isinstance(error, RankLostError):
        clear_bar()
    print_failure(error, error.advice, RANK_STATUS.print_error)


if __name__ == "__main__":
    prepare()
    sys.exit(main())
