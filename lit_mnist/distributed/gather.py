"""An all-gather of JSON values. torch's `all_gather_object` unpickles, and so may execute, what other ranks send."""

from __future__ import annotations

import atexit
import json
import os
import time
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

_SECONDS_AT_EXIT = 0.1


def all_gather_json(own: Any) -> list[Any]:
    """Gathers a value from every rank; every rank must call it.

    Args:
        own: The value of this rank: numbers, strings, paths, None, and lists and dictionaries of these.

    Returns:
        The values in rank order, after a JSON round trip: numbers, infinities and NaN are exact, tuples become lists,
        and paths become strings.

    Raises:
        TypeError: JSON cannot express the value.
    """
    return [json.loads(part) for part in all_gather_bytes(json.dumps(own, default=os.fspath).encode())]


def all_gather_bytes(own: bytes) -> list[bytes]:
    """Returns the bytes of all ranks; every rank must call it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [own]
    # NCCL cannot send CPU tensors.
    device = "cpu" if "cpu:" in dist.get_backend_config() else f"cuda:{torch.cuda.current_device()}"
    content = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    length = torch.tensor([len(content)], device=device)
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, length)
    counts = [int(count) for count in lengths]
    padded = torch.zeros(max(counts), dtype=torch.uint8, device=device)
    padded[: len(content)] = content
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return [part[:count].cpu().numpy().tobytes() for part, count in zip(parts, counts, strict=True)]


@cache
def end_collectives_at_exit() -> None:
    """Lets gloo's threads end the last collectives of this process before the interpreter is finalized.

    A thread of gloo that has completed a collective waits for Python's lock to release the tensors. If the interpreter
    is finalized meanwhile, CPython ends the thread, and C++ ends the process with "terminate called without an active
    exception". Neither torch nor Lightning destroys a gloo process group at exit. It is not destroyed here either,
    since that would wait for collectives that other ranks never join.
    """
    # Sleeping releases Python's lock.
    atexit.register(lambda: time.sleep(_SECONDS_AT_EXIT) if dist.is_initialized() else None)
