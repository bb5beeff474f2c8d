"""Who is late: the ranks tell each other once a second how far they are, beside the training and not within it."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed import DistError, PrefixStore, Store, TCPStore

from lit_mnist.distributed.failure import RANK_STATUS
from lit_mnist.distributed.private_folder import own_private_folder
from lit_mnist.distributed.rank import Rank

_SECONDS_BETWEEN = 1.0
_SECONDS_UNTIL_LATE = 10.0
# What stands for a rank that has not told anything yet.
_NOTHING: dict[str, Any] = {"beats": 0, "begun": 0, "step": 0, "pid": None, "host": None}


class _Notes:
    """A file for each key in a folder of this machine; torch's own store in files keeps every value that ever was.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder

    def set(self, key: str, value: str) -> None:
        """Writes a value, which is read as a whole or not at all."""
        written = self._folder / f"{key}.new"
        written.write_text(value)
        written.replace(self._folder / key)

    def get(self, key: str) -> bytes:
        """Returns a value."""
        return (self._folder / key).read_bytes()

    def check(self, keys: Sequence[str]) -> bool:
        """Returns whether all keys have values."""
        return all((self._folder / key).exists() for key in keys)


@dataclass
class _Heard:
    """What a rank last told, and when."""

    beat: dict[str, Any]
    alive: float
    moved: float
    named: bool = False


class Heartbeat:
    """Tells the others of this rank, and names one that is late by more than 10 seconds.

    A rank that waits in a collective is as far as the others, since a micro-batch counts when it enters the network;
    one that computes, reads or sleeps for long is behind; one that is stopped, or cut off, is not heard of. Rank 0
    watches all others, and rank 1 watches rank 0.

    Args:
        rank: This rank.
        net: The bare network.
        step: The step that the training begins with.
    """

    def __init__(self, rank: Rank, net: nn.Module, step: int) -> None:
        self.rank = rank
        self._begun = 0
        self._first_step = step
        self._heard: dict[int, _Heard] = {}
        self._closed = threading.Event()
        self._hook = net.register_forward_pre_hook(self._begin)
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends it, before a process group is destroyed."""
        self._closed.set()
        self._hook.remove()

    def _begin(self, net: nn.Module, _: Any) -> None:
        self._begun += net.training

    def _run(self) -> None:
        watched = {0: range(1, self.rank.world_size), 1: range(1)}.get(self.rank.rank, range(0))
        beats = 0
        store: Store | _Notes | None = None
        while True:
            try:
                store = store or self._connect()
                beats += 1
                known = {"beats": beats, "begun": self._begun, "step": RANK_STATUS.step}
                store.set(str(self.rank.rank), json.dumps({**known, "pid": os.getpid(), "host": socket.gethostname()}))
                for other in watched:
                    told = json.loads(store.get(str(other))) if store.check([str(other)]) else _NOTHING
                    self._look(other, told)
                RANK_STATUS.late = " ".join(self._sentence(other) for other in watched if self._is_late(other))
                self._warn()
            except (DistError, RuntimeError, OSError) as error:
                if not self._closed.is_set():
                    logging.getLogger(__name__).warning("the store does not answer: %s", error)
                store = None
            if self._closed.wait(_SECONDS_BETWEEN):
                return

    def _connect(self) -> Store | _Notes:
        """Returns where the ranks tell each other; in the store of the process group one could wait behind another."""
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if folder := own_private_folder():
            return _Notes(folder / f"heartbeat-{attempt}-{self._first_step}")
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        timeout = timedelta(seconds=_SECONDS_UNTIL_LATE)
        store = TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
        return PrefixStore(f"heartbeat/{attempt}/{self._first_step}", store)

    def _look(self, other: int, beat: dict[str, Any]) -> None:
        now = time.monotonic()
        heard = self._heard.setdefault(other, _Heard(beat, now, now))
        if beat["beats"] != heard.beat["beats"]:
            heard.alive = now
        # Only the time that the others wait for it counts.
        if beat["begun"] != heard.beat["begun"] or beat["begun"] >= self._begun:
            heard.moved = now
        heard.beat = beat

    def _is_late(self, other: int) -> bool:
        heard, now = self._heard.get(other), time.monotonic()
        return heard is not None and now - min(heard.alive, heard.moved) > _SECONDS_UNTIL_LATE

    def _sentence(self, other: int) -> str:
        heard, now = self._heard[other], time.monotonic()
        if not heard.beat["beats"]:
            return f"Rank {other} has not been heard of for {now - heard.alive:.0f} s."
        who = f"Rank {other} (process {heard.beat['pid']} on {heard.beat['host']})"
        if now - heard.alive > _SECONDS_UNTIL_LATE:
            return f"{who} has not been heard of for {now - heard.alive:.0f} s; it was in step {heard.beat['step']}."
        return f"{who} is late: it has been in step {heard.beat['step']} for {now - heard.moved:.0f} s."

    def _warn(self) -> None:
        for other, heard in self._heard.items():
            late = self._is_late(other)
            if late and not heard.named:
                RANK_STATUS.warn(self._sentence(other))
            elif heard.named and not late:
                RANK_STATUS.warn(f"Rank {other} goes on.")
            heard.named = late
