"""A trace of the samples, losses and weights of each step, for comparing two trainings.

It observes the images that enter the network, the weights, and the kernel's counters of sent bytes. It does not change
the training and calls no collective.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from lit_mnist.checkpoint.atomic_io import write_text
from lit_mnist.checkpoint.digest import tensor_sha256, weights_sha256
from lit_mnist.distributed.peer_exchange import SENT
from lit_mnist.distributed.rank import Rank
from lit_mnist.profiling.torch_internals import list_operations

FOLDER = "trace"
_FIRST_COUNTED = 3
# The offset of `tcpi_bytes_sent` in the kernel's `struct tcp_info` (linux/tcp.h, since 4.19). `tcpi_bytes_retrans`
# follows it.
_TCP_INFO_SIZE, _BYTES_SENT = 248, 200
# Bytes per element of the profiler's dtypes.
_ITEM_SIZES = {"float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2, "long int": 8, "int": 4, "unsigned char": 1}


class Trace:
    """Records the steps, and writes `trace/rank-N.json` to the run folder at the end of the training.

    Args:
        net: The network whose weights are recorded.
        folder: The run folder.
        rank: This rank.
        dtype: The dtype of the network, to which some engines convert the samples.
        forward: Whether the samples are the first argument of the network's forward pass; otherwise, `add` is called.
        last_counted: The last step whose traffic is counted, of at most 8 from step 4 on; 0 for none.
        keep: The step after which the weights are saved to `trace/rank-N-step-S.npz`.
    """

    def __init__(
        self,
        net: nn.Module,
        folder: Path,
        rank: Rank,
        *,
        dtype: torch.dtype,
        forward: bool,
        last_counted: int,
        keep: int | None,
    ) -> None:
        self.net, self.folder, self.rank, self.keep = net, folder / FOLDER, rank, keep
        self._dtype = dtype
        self._counted = range(_FIRST_COUNTED, min(last_counted, _FIRST_COUNTED + 8))
        self._traffic = _Traffic()
        self._initial: dict[str, str] = {}
        self._steps: list[dict[str, Any]] = []
        self._losses: list[torch.Tensor] = []
        self._samples = 0
        # Each replica of nn.DataParallel calls the hook in its own thread.
        self._lock = threading.Lock()
        self._hook = net.register_forward_pre_hook(self._add_argument) if forward else None

    def _add_argument(self, net: nn.Module, arguments: tuple[Any, ...]) -> None:
        if net.training:
            self.add(arguments[0])

    def add(self, batch: Any) -> None:
        """Adds the digests of the samples in a nested batch. The sum over the ranks has the same meaning."""
        with self._lock:
            # In the first step, since engines convert and restore a network after they have created it.
            self._initial = self._initial or self._digests()
            for tensor in _tensors_in(batch):
                samples = tensor.to(self._dtype) if tensor.is_floating_point() else tensor
                self._samples = (self._samples + sum(sample_digests(samples))) % 2**64

    def on_batch_end(self, loss: torch.Tensor) -> None:
        """Records the mean loss of a micro-batch."""
        self._losses.append(loss)

    def on_step_end(self, step: int, lr: float) -> None:
        """Records an optimizer step (from 1) and its learning rate."""
        self._traffic.on_step_end()
        losses = [float(loss) for loss in self._losses]
        self._steps.append(
            {
                "step": step,
                "samples": f"{self._samples:016x}",
                "lr": lr,
                "loss": sum(losses) / len(losses),
                "weights": self._digests(),
            }
        )
        self._losses, self._samples = [], 0
        if step == self.keep:
            self.folder.mkdir(exist_ok=True)
            weights = {name: tensor.detach().cpu().numpy() for name, tensor in _weights(self.net).items()}
            np.savez(self.folder / f"rank-{self.rank.rank}-step-{step}.npz", allow_pickle=False, **weights)
        if step in self._counted:
            self._traffic.start()
        if step == self._counted.stop:
            self._traffic.stop()

    def _digests(self) -> dict[str, str]:
        return {name: tensor_sha256(tensor) for name, tensor in _weights(self.net).items()}

    def close(self) -> None:
        """Writes the file."""
        if self._hook:
            self._hook.remove()
        self._traffic.stop()
        self.folder.mkdir(exist_ok=True)
        content = {
            "initial": self._initial,
            "steps": self._steps,
            "weights_sha256": weights_sha256(_weights(self.net)),
            "traffic": self._traffic.per_step(),
        }
        write_text(self.folder / f"rank-{self.rank.rank}.json", json.dumps(content) + "\n")


def _weights(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in net.state_dict().items() if isinstance(value, torch.Tensor)}


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors with a row for each sample in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        if value.ndim and len(value):
            yield value
    elif isinstance(value, Mapping):
        yield from (tensor for part in value.values() for tensor in _tensors_in(part))
    elif isinstance(value, list | tuple):
        yield from (tensor for part in value for tensor in _tensors_in(part))


def sample_digests(samples: torch.Tensor) -> list[int]:
    """Returns a 64-bit digest of each sample of a batch, [batch, ...]."""
    flat = samples.detach().cpu().contiguous().view(len(samples), -1).view(torch.uint8).numpy()
    return [int.from_bytes(hashlib.blake2b(row, digest_size=8).digest()) for row in flat]


class _Traffic:
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
        # Only the first call has an effect.
        if self._profile or self._steps:
            return
        # Otherwise the profiler writes to standard error.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._profile = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
        self._profile.start()
        self._exchanged = SENT.copy()
        self._sent_before = _bytes_sent()

    def on_step_end(self) -> None:
        self._steps += self._profile is not None

    def stop(self) -> None:
        if self._profile is None:
            return
        sent = _bytes_sent()
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
        steps = self._steps or math.nan
        return {
            "steps": self._steps,
            "bytes_sent": None if self._sent is None or not self._steps else self._sent / steps,
            "payload_bytes": self._payload / steps if self._steps else None,
            "collectives": {name: count / steps for name, count in sorted(self._collectives.items())},
        }


def _bytes_sent() -> int | None:
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
        if len(info) >= _BYTES_SENT + 16:
            # A busy machine sends data again that has arrived.
            sent, sent_again = struct.unpack_from("=QQ", info, _BYTES_SENT)
            total += sent - sent_again
    return total


def _payload(shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> int:
    return sum(math.prod(shape) * _ITEM_SIZES.get(dtype, 0) for shape, dtype in zip(shapes, dtypes, strict=False))
