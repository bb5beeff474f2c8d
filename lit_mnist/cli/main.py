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
from contextlib import suppress
from pathlib import Path

from ddp_doctor.command import main as doctor
from lit_mnist.cli.help import help_text
from lit_mnist.cli.imports import import_packages, split_imports
from lit_mnist.cli.own_module import read_own_request
from lit_mnist.cli.parser import parse
from lit_mnist.distributed.rank import (
    Rank,
    adopt_slurm,
    check_ranks_environment,
    die_with_parent,
    launched_from_outside,
)
from lit_mnist.distributed.signals import STOP, require_main_thread
from lit_mnist.distributed.terminal import clear_bar, guard_streams, print_error, print_failure, print_line
from lit_mnist.engines.capabilities import check_engine
from lit_mnist.errors import InputError, LitMnistError, RankLostError
from lit_mnist.export.flags import parse_export


def main(argv: list[str] | None = None, engine: str = "lightning") -> int:
    """Runs a command and returns its exit code.

    Args:
        argv: The arguments; by default those of the process.
        engine: Name of the engine.
    """
    guard_streams()
    words = sys.argv[1:] if argv is None else argv
    outside, code = False, 0
    if words[:1] == ["doctor"] and engine == "lightning":
        return doctor(words[1:])
    try:
        if text := help_text(words, engine):
            print_line(text)
            return 0
        guard_streams(lambda text: print_error(f"warning: This command {text}"))
        require_main_thread()
        STOP.listen()
        adopt_slurm()
        check_ranks_environment()
        outside = launched_from_outside()
        if outside:
            die_with_parent()
        typed = sys.orig_argv if argv is None else [sys.argv[0], *argv]
        code = _run(words, engine, shlex.join([Path(typed[0]).name, *typed[1:]]))
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


def _run(words: list[str], engine: str, command: str) -> int:
    if words[:1] == ["export"]:
        if engine != "lightning":
            raise InputError("Only train.py has the command export: python train.py export ...")
        packages, words = split_imports(words[1:])
        # Wrong flags are rejected before anything is imported.
        parse_export(words)
        import_packages(packages)
        from lit_mnist.export.command import run_export

        return run_export(words)
    own = read_own_request(words)
    if own:
        if engine != "lightning":
            raise InputError(f"The engine {engine} trains this project's networks only: use lit-mnist or train.py.")
        from lit_mnist.cli.own_run import start_own

        start_own(own, command)
        return 0
    request = parse(words, engine)
    if request.command == "compare":
        if engine != "lightning":
            raise InputError("Only train.py has the command compare: python train.py compare ...")
        from lit_mnist.comparison.command import compare

        return compare(request, command, main)
    check_engine(engine, request.command, request.settings, request.extras.for_lightning)
    from lit_mnist.cli.start import start

    start(request, engine, command)
    return 0


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
    sys.exit(main())
