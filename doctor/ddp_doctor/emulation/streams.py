"""Streams and events of emulated GPUs: everything is done at once, in the order of the program."""

from __future__ import annotations

import time
from typing import Any

from ddp_doctor.emulation.devices import gpus, named


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Does nothing: what was called before is done."""


def _is_done(*args: Any) -> bool:
    """Returns that everything before is done."""
    return True


class Event:
    """An event that is over as soon as it is recorded."""

    wait = synchronize = _nothing
    query = _is_done

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_event, self._time = 0, 0.0

    @property
    def device(self) -> Any:
        """The device of the event."""
        return gpus.device()

    def record(self, stream: Any = None) -> None:
        """Takes the time."""
        self._time = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        """Returns the milliseconds between two events."""
        return (end_event._time - self._time) * 1e3


class Stream:
    """A stream, which computes at once."""

    wait_event = wait_stream = synchronize = __exit__ = _nothing
    query = _is_done

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.priority, self.cuda_stream, self.stream_id = priority, 0, 0
        self.device, self.device_index = gpus.device(), gpus.current

    def __enter__(self) -> Stream:
        return self

    def record_event(self, event: Any = None) -> Any:
        """Records an event, and returns it."""
        event = event or Event()
        event.record()
        return event

    def is_capturing(self) -> bool:
        """Returns that no graph is captured."""
        return False


class StreamContext:
    """The context `torch.cuda.stream(stream)`."""

    __exit__ = _nothing

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> Any:
        return self.stream


class DeviceContext:
    """The contexts `torch.cuda.device` and `torch.cuda.device_of`."""

    def __init__(self, device: Any) -> None:
        found = named(getattr(device, "device", device))
        self.idx = found.index if found is not None and found.index is not None else gpus.current
        self.prev_idx = gpus.current

    def __enter__(self) -> None:
        self.prev_idx, gpus.current = gpus.current, self.idx

    def __exit__(self, *error: Any) -> None:
        gpus.current = self.prev_idx


class CudaGraph:
    """Stands for `torch.cuda.CUDAGraph` and `torch.cuda.graph`, which a program cannot make."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("CUDA graphs are not emulated: turn them off, or examine the code on a GPU.")
