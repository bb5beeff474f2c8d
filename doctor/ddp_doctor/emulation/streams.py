"""Streams, events and CUDA graphs of emulated GPUs: everything is done at once, in the order of the program."""

from __future__ import annotations

import time
from typing import Any

from ddp_doctor.emulation.devices import gpus


class Event:
    """An event that is over as soon as it is recorded."""

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

    def query(self) -> bool:
        """Returns that everything before the event is done."""
        return True

    def wait(self, stream: Any = None) -> None:
        """Does nothing: what was called before is done."""

    def synchronize(self) -> None:
        """Does nothing: what was called before is done."""


class Stream:
    """A stream, which computes at once."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.priority, self.cuda_stream, self.stream_id = priority, 0, 0
        self.device, self.device_index = gpus.device(), gpus.current

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        """Records an event, and returns it."""
        event = event or Event()
        event.record()
        return event

    def wait_event(self, event: Any) -> None:
        """Does nothing: the event is over."""

    def wait_stream(self, stream: Any) -> None:
        """Does nothing: the other stream has computed."""

    def synchronize(self) -> None:
        """Does nothing: everything is computed."""

    def query(self) -> bool:
        """Returns that everything is computed."""
        return True

    def is_capturing(self) -> bool:
        """Returns whether a graph is captured."""
        from ddp_doctor.emulation.graphs import CUDAGraph

        return CUDAGraph.capturing is not None


class StreamContext:
    """The context `torch.cuda.stream(stream)`."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> Any:
        return self.stream

    def __exit__(self, *error: Any) -> None:
        pass


class DeviceContext:
    """The contexts `torch.cuda.device` and `torch.cuda.device_of`."""

    def __init__(self, device: Any) -> None:
        from ddp_doctor.emulation.devices import named

        found = named(device if not hasattr(device, "device") else device.device)
        self.idx = found.index if found is not None and found.index is not None else gpus.current
        self.prev_idx = gpus.current

    def __enter__(self) -> None:
        self.prev_idx, gpus.current = gpus.current, self.idx

    def __exit__(self, *error: Any) -> None:
        gpus.current = self.prev_idx
