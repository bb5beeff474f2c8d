"""The command line: step 1, parse; then `prepare` and the ranks. Only a valid command line imports torch.

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

from lit_mnist.cli.help import asks_for_help
from lit_mnist.cli.parser import Request, parse
from lit_mnist.distributed.rank import Rank, adopt_slurm, die_with_parent, launched_from_outside
from lit_mnist.distributed.signals import STOP, require_main_thread
from lit_mnist.distributed.terminal import clear_bar, guard_streams, print_error, print_failure, print_line
from lit_mnist.engines.capabilities import check_engine
from lit_mnist.errors import InputError, LitMnistError, RankLostError


def main(argv: list[str] | None = None, engine: str = "lightning") -> int:
    """Runs a command and returns its exit code.

    Args:
        argv: The arguments; by default the process's own.
        engine: Name of the engine.
    """
    guard_streams()
    words = sys.argv[1:] if argv is None else argv
    outside, request, code = False, None, 0
    try:
        if text := asks_for_help(words, engine):
            print_line(text)
            return 0
        guard_streams(lambda text: print_error(f"warning: This command {text}"))
        require_main_thread()
        STOP.listen()
        adopt_slurm()
        outside = launched_from_outside()
        if outside:
            die_with_parent()
        request = parse(words, engine)
        code = _run(request, engine, _command(argv))
    except LitMnistError as error:
        code = error.exit_code
        if outside and code != RankLostError.exit_code and not _speaks(prepares=not error.started):
            # Another rank prints the same message, and the launcher kills it as soon as this one has ended.
            time.sleep(1)
        elif error.started:
            from lit_mnist.distributed.rank_status import RANK_STATUS

            if isinstance(error, RankLostError):
                clear_bar()
            print_failure(error, error.advice, RANK_STATUS.print_error)
        else:
            print_failure(error)
    if outside and code:
        # Immediately: ranks that wait for this one are released only when it ends.
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    return code


def _run(request: Request, engine: str, command: str) -> int:
    """Runs a request, and returns the exit code of one that ends well."""
    if request.command == "compare":
        if engine != "lightning":
            raise InputError("compare is train.py's own: python train.py compare ...")
        from lit_mnist.comparison.command import compare

        return compare(request, command, main)
    check_engine(engine, request.command, request.settings, request.extras.for_lightning)
    from lit_mnist.cli.start import start

    start(request, engine, command)
    return 0


def _speaks(*, prepares: bool) -> bool:
    """Returns whether this rank prints an error: rank 0, and before a run one rank of each machine."""
    rank = Rank.from_environment()
    return rank.local_rank == 0 if prepares else rank.is_first


def _command(argv: list[str] | None) -> str:
    words = sys.orig_argv if argv is None else [sys.argv[0], *argv]
    return shlex.join([Path(words[0]).name, *words[1:]])


if __name__ == "__main__":
    sys.exit(main())
