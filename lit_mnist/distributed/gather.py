"""An all-gather of JSON values: torch's own all-gather of objects unpickles, and so executes, what other ranks send."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
import torch.distributed as dist


def all_gather_json(own: Any) -> list[Any]:
    """Returns the values of all ranks as JSON gives them back; every rank must call it.

    Numbers come back exactly, also infinite ones and NaN. Tuples come back as lists, paths as text.

    Args:
        own: This rank's value: numbers, text, paths, None, and lists and dictionaries of them.

    Raises:
        TypeError: JSON cannot express the value.
    """
    written = json.dumps(own, default=os.fspath).encode()
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [json.loads(written)]
    # NCCL cannot send tensors of the CPU.
    device = "cpu" if "cpu:" in dist.get_backend_config() else f"cuda:{torch.cuda.current_device()}"
    content = torch.frombuffer(bytearray(written), dtype=torch.uint8)
    length = torch.tensor([len(content)], device=device)
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, length)
    counts = [int(count) for count in lengths]
    padded = torch.zeros(max(counts), dtype=torch.uint8, device=device)
    padded[: len(content)] = content
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return [json.loads(part[:count].cpu().numpy().tobytes()) for part, count in zip(parts, counts, strict=True)]
