"""The ways to run the experiment: an engine and how its ranks are started."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lit_mnist.distributed.rank import die_with_parent
from lit_mnist.engines.capabilities import ENGINES
from lit_mnist.errors import InputError, nearest

# Runs a command line with an engine in this process, and returns its exit code.
Main = Callable[[list[str], str], int]
_RAW_DDP_STARTS = ("torchrun", "spawn")


@dataclass(frozen=True)
class Variant:
    """An engine, and how its ranks are started.

    Attributes:
        engine: Name of the engine.
        start: `agent`, `spawn` or `torchrun`.
    """

    engine: str
    start: str = "agent"

    @property
    def name(self) -> str:
        """The name on the command line, such as `raw_ddp:spawn`."""
        return self.engine if self.start == "agent" else f"{self.engine}:{self.start}"

    @property
    def folder(self) -> str:
        """A name for its folder."""
        return self.name.replace(":", "-")

    def command(self, words: Sequence[str], ranks: int) -> list[str]:
        """Returns the command that runs it in processes of its own."""
        module = ["-m", f"lit_mnist.engines.{self.engine}"]
        if self.start == "torchrun":
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            return [sys.executable, *torchrun, *module, *words]
        return [sys.executable, *module, *words, *self._flags(ranks)]

    def run(self, words: Sequence[str], ranks: int, log: Path, *, main: Main | None = None) -> int:
        """Runs it to its end, and returns its exit code.

        Args:
            words: The flags, but not those of the ranks.
            ranks: Number of ranks.
            log: File for what it prints.
            main: Runs it in a fork of this process, which starts at once; else a new Python does, as a user would.
        """
        child = os.fork()
        if child == 0:
            code = 99
            try:
                die_with_parent()
                descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
                os.dup2(descriptor, 1)
                os.dup2(descriptor, 2)
                if main is None or self.start != "agent":
                    command = self.command(words, ranks)
                    os.execv(command[0], command)  # noqa: S606
                code = main([*words, *self._flags(ranks)], self.engine)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        try:
            _, status = os.waitpid(child, 0)
        except BaseException:
            _end(child)
            raise
        return os.waitstatus_to_exitcode(status)

    def _flags(self, ranks: int) -> list[str]:
        return ["--devices", str(ranks), *(["--launcher", "spawn"] if self.start == "spawn" else [])]


def _end(child: int) -> None:
    """Ends a run: by a signal that its launcher passes on to the ranks, and after some seconds by force."""
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(child, signal.SIGTERM)
        for _ in range(100):
            if os.waitpid(child, os.WNOHANG)[0]:
                return
            time.sleep(0.05)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def choose_variants(names: str) -> list[Variant]:
    """Returns the variants that `--engines` names.

    Args:
        names: `all`, or names divided by commas.

    Raises:
        InputError: A name is unknown, or given twice.
    """
    raw_ddp = [Variant("raw_ddp", start) for start in ("agent", *_RAW_DDP_STARTS)]
    known = {
        variant.name: variant
        for engine in ENGINES
        for variant in (raw_ddp if engine == "raw_ddp" else [Variant(engine)])
    }
    if names == "all":
        return list(known.values())
    chosen = names.split(",")
    for name in chosen:
        if name not in known:
            raise InputError(f"Unknown engine {name!r}{nearest(name, known) or ': use all, ' + ', '.join(known) + '.'}")
        if chosen.count(name) > 1:
            raise InputError(f"--engines names {name} twice.")
    return [known[name] for name in chosen]
