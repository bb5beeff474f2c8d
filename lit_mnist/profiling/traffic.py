"""Counts what a rank sends: bytes with the kernel's counters, collectives with torch's profiler and the peer exchange."""

from __future__ import annotations

import math
import os
import socket
import struct
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from lit_mnist.distributed.peer_exchange import SENT
from lit_mnist.profiling._private import list_operations

# The offset of `tcpi_bytes_sent` in the kernel's `struct tcp_info` (linux/tcp.h, since 4.19).
_TCP_INFO_SIZE, _BYTES_SENT = 248, 200
# Bytes per element of the profiler's dtypes.
_ITEM_SIZES = {"float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2, "long int": 8, "int": 4, "unsigned char": 1}


def bytes_sent() -> int | None:
    """Returns the bytes sent through the open TCP connections of this process, or None if they are unknown."""
    try:
        links = list(Path("/proc/self/fd").iterdir())
    except OSError:
        return None
    total = 0
    for link in links:
        try:
            if not str(link.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(link.name))) as connection:
                if connection.type != socket.SOCK_STREAM or connection.family not in {socket.AF_INET, socket.AF_INET6}:
                    continue
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_SIZE)
        except OSError:
            continue
        if len(info) >= _BYTES_SENT + 8:
            total += struct.unpack_from("=Q", info, _BYTES_SENT)[0]
    return total


class Traffic:
    """Counts the traffic of the steps between `start` and `stop`."""

    def __init__(self) -> None:
        self._profile: profile | None = None
        self._steps = 0
        self._sent_before: int | None = None
        self._sent: int | None = None
        self._collectives: Counter[str] = Counter()
        self._payload = 0
        self._exchanged: Counter[str] = Counter()

    def start(self) -> None:
        """Starts the counters. Only the first call has an effect."""
        if self._profile or self._steps:
            return
        # Otherwise the profiler writes to standard error.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._profile = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
        self._profile.start()
        self._exchanged = SENT.copy()
        self._sent_before = bytes_sent()

    def on_step_end(self) -> None:
        """Counts a step."""
        self._steps += self._profile is not None

    def stop(self) -> None:
        """Stops the counters."""
        if self._profile is None:
            return
        sent = bytes_sent()
        exchanged = SENT - self._exchanged
        by_unix = exchanged.pop("unix", 0)
        if sent is not None and self._sent_before is not None:
            self._sent = sent - self._sent_before + by_unix
        self._profile.stop()
        self._payload += exchanged.pop("payload", 0)
        self._collectives.update(exchanged)
        for operation, shapes, dtypes in list_operations(self._profile):
            backend, _, name = operation.partition(":")
            if backend == "nccl":
                # NCCL does not use only TCP connections.
                self._sent = None
            if backend in {"gloo", "nccl"}:
                self._collectives[name] += 1
                self._payload += _payload(shapes, dtypes) if name != "recv" else 0
        self._profile = None

    def per_step(self) -> dict[str, Any]:
        """Returns the mean per step of the bytes sent, the bytes of the tensors, and the number of each collective."""
        steps = self._steps or math.nan
        return {
            "steps": self._steps,
            "bytes_sent": None if self._sent is None or not self._steps else self._sent / steps,
            "payload_bytes": self._payload / steps if self._steps else None,
            "collectives": {name: count / steps for name, count in sorted(self._collectives.items())},
        }


def _payload(shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> int:
    return sum(math.prod(shape) * _ITEM_SIZES.get(dtype, 0) for shape, dtype in zip(shapes, dtypes, strict=False))
