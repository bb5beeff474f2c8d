"""The heartbeat: a background thread of each rank exchanges progress once a second to detect a late rank."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import DistError, PrefixStore, Store

from lit_mnist.distributed.private_folder import launch_private_folder
from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.rank_status import RANK_STATUS
from lit_mnist.distributed.rendezvous import connect_to_master

_SECONDS_BETWEEN = 1.0
_SECONDS_UNTIL_LATE = 10.0
# Stands for a rank that has not sent a heartbeat yet.
_NO_HEARTBEAT: dict[str, Any] = {"beats": 0, "begun": 0, "step": 0, "pid": None, "host": None}


class _FolderStore:
    """A store with one file per key. torch's FileStore grows with each value that is set."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder

    def set(self, key: str, value: str) -> None:
        temporary = self._folder / f"{key}.new"
        temporary.write_text(value)
        temporary.replace(self._folder / key)

    def get(self, key: str) -> bytes:
        return (self._folder / key).read_bytes()

    def check(self, keys: Sequence[str]) -> bool:
        return all((self._folder / key).exists() for key in keys)


@dataclass
class _Peer:
    """The last heartbeat of another rank, and its state."""

    heartbeat: dict[str, Any]
    # Time of the last heartbeat.
    alive: float
    # Time of the last progress, or the last time that the rank was not behind this one.
    moved: float
    reported: bool = False

    @property
    def is_silent(self) -> bool:
        return time.monotonic() - self.alive > _SECONDS_UNTIL_LATE

    @property
    def is_late(self) -> bool:
        return time.monotonic() - min(self.alive, self.moved) > _SECONDS_UNTIL_LATE


class Heartbeat:
    """Sends the heartbeats of this rank, and reports ranks that are late by more than 10 seconds.

    Progress is the number of micro-batches that a rank has begun. A rank that waits in a collective has the
    same progress as the others, a rank that computes or reads for long is behind, and a stopped or disconnected rank
    sends nothing. Rank 0 watches all other ranks, and rank 1 watches rank 0.

    Args:
        rank: This rank.
        step: The first step of the training.
    """

    def __init__(self, rank: Rank, step: int) -> None:
        self.rank = rank
        self._begun = 0
        self._first_step = step
        self._peers: dict[int, _Peer] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the heartbeat, before the process group is destroyed."""
        self._closed.set()

    def begin_batch(self) -> None:
        """Counts a micro-batch of the training that this rank begins."""
        self._begun += 1

    def _run(self) -> None:
        watched = {0: range(1, self.rank.world_size), 1: range(1)}.get(self.rank.rank, range(0))
        store: Store | _FolderStore | None = None
        beats = 0
        while not self._closed.is_set():
            try:
                store = store or self._open_store()
                beats += 1
                process = {"pid": os.getpid(), "host": socket.gethostname()}
                progress = {"beats": beats, "begun": self._begun, "step": RANK_STATUS.step}
                store.set(str(self.rank.rank), json.dumps({**process, **progress}))
                for other in watched:
                    received = json.loads(store.get(str(other))) if store.check([str(other)]) else _NO_HEARTBEAT
                    self._update(other, received)
                self._report()
            except (DistError, RuntimeError, OSError) as error:
                if not self._closed.is_set():
                    logging.getLogger(__name__).warning("the store does not respond: %s", error)
                store = None
            self._closed.wait(_SECONDS_BETWEEN)

    def _open_store(self) -> Store | _FolderStore:
        # In the process group's own store, a request could wait behind another one.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if folder := launch_private_folder():
            return _FolderStore(folder / f"heartbeat-{attempt}-{self._first_step}")
        return PrefixStore(f"heartbeat/{attempt}/{self._first_step}", connect_to_master(_SECONDS_UNTIL_LATE))

    def _update(self, other: int, heartbeat: dict[str, Any]) -> None:
        now = time.monotonic()
        peer = self._peers.setdefault(other, _Peer(heartbeat, now, now))
        if heartbeat["beats"] != peer.heartbeat["beats"]:
            peer.alive = now
        # Only the time counts during which this rank is ahead.
        if heartbeat["begun"] != peer.heartbeat["begun"] or heartbeat["begun"] >= self._begun:
            peer.moved = now
        peer.heartbeat = heartbeat

    def _report(self) -> None:
        """Reports each rank that has become late or has caught up."""
        late = {other: self._describe(other) for other, peer in self._peers.items() if peer.is_late}
        RANK_STATUS.late_rank = " ".join(late.values())
        for other, peer in self._peers.items():
            if other in late and not peer.reported:
                RANK_STATUS.warn(late[other])
            elif peer.reported and other not in late:
                RANK_STATUS.warn(f"Rank {other} continues.")
            peer.reported = other in late

    def _describe(self, other: int) -> str:
        peer, now = self._peers[other], time.monotonic()
        silence = f"has sent no heartbeat for {now - peer.alive:.0f} s"
        if not peer.heartbeat["beats"]:
            return f"Rank {other} {silence}."
        who = f"Rank {other} (process {peer.heartbeat['pid']} on {peer.heartbeat['host']})"
        if peer.is_silent:
            return f"{who} {silence}; it was in step {peer.heartbeat['step']}."
        return f"{who} is late: it has been in step {peer.heartbeat['step']} for {now - peer.moved:.0f} s."
