"""The functions of torch.cuda and torch.accelerator, mixed precision and compilation, for emulated GPUs.

Streams and events compute at once, in the order of the program. Autocast is that of the CPU in the type of the GPU. A
GradScaler works on any device. What is compiled is called as it is.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.amp.autocast_mode import autocast
from torch.utils.data._utils import pin_memory as pinning

from ddp_doctor.emulation.process_groups import install_process_groups
from ddp_doctor.emulation.tensors import gpu_generator, gpus, install_tensors, named
from ddp_doctor.probes.wrap import wrap

_MEMORY = 80 * 1024**3
_PROPERTIES = SimpleNamespace(
    name="Emulated GPU", major=8, minor=0, total_memory=_MEMORY, multi_processor_count=108, warp_size=32
)
# Functions that return 0, and those that do nothing.
_NUMBER = re.compile(
    r"(max_)?memory_(allocated|reserved|cached)|utilization|temperature|power_draw|clock_rate|memory_usage"
)
_NOTHING = re.compile(
    r"_lazy_init|init|synchronize|empty_cache|ipc_collect|reset_.*"
    r"|set_(stream|per_process_memory_fraction|sync_debug_mode)"
)
# The type that autocast uses on a GPU by default; that of the CPU is bfloat16.
_AUTOCAST_TYPE = torch.float16
# Keeps the kernel that is registered.
_libraries: list[torch.library.Library] = []


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Does nothing: what was called before is done."""


def _is_done(*args: Any) -> bool:
    return True


class Event:
    """An event that is over as soon as it is recorded."""

    wait = synchronize = _nothing
    query = _is_done

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._time = 0.0

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


@contextmanager
def _on_device(device: Any) -> Iterator[None]:
    """The contexts `torch.cuda.device` and `torch.cuda.device_of`."""
    before = gpus.current
    _set_device(device)
    try:
        yield
    finally:
        gpus.current = before


def _set_device(device: Any) -> None:
    found = named(device)
    if found is not None and found.index is not None:
        gpus.current = found.index


_VALUES = {
    **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported", "is_tf32_supported"), True),
    "is_current_stream_capturing": False,
    "get_device_name": _PROPERTIES.name,
    "get_device_capability": (_PROPERTIES.major, _PROPERTIES.minor),
    "get_device_properties": _PROPERTIES,
    "mem_get_info": (_MEMORY, _MEMORY),
    "memory_stats": {},
    "memory_summary": "",
    **dict.fromkeys(("current_stream", "default_stream"), Stream()),
}
_FUNCTIONS: dict[str, Any] = {
    **dict.fromkeys(("stream", "StreamContext"), nullcontext),
    **dict.fromkeys(("device", "device_of"), _on_device),
    **dict.fromkeys(("manual_seed", "manual_seed_all"), gpu_generator.seed),
    "Stream": Stream,
    "Event": Event,
    "device_count": lambda: gpus.count,
    "current_device": lambda: gpus.current,
    "set_device": _set_device,
    "initial_seed": lambda: gpu_generator.initial_seed,
    "get_rng_state": lambda device="cuda": gpu_generator.now.get_state(),
    "get_rng_state_all": lambda: [gpu_generator.now.get_state() for _ in range(gpus.count)],
    "set_rng_state": lambda new_state, device="cuda": gpu_generator.now.set_state(new_state),
    "set_rng_state_all": lambda new_states: gpu_generator.now.set_state(new_states[0]),
}


def install(count: int) -> None:
    """Lets this process see so many emulated GPUs, and compute on them."""
    gpus.count = count
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        # Programs also count the GPUs here; real ones stay hidden.
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(count)))
    install_tensors()
    install_process_groups()
    cuda: Any = torch.cuda
    accelerator: Any = torch.accelerator
    for name, value in _VALUES.items():
        setattr(cuda, name, lambda *args, _value=value, **kwargs: _value)
    for name, function in _FUNCTIONS.items():
        setattr(cuda, name, function)
    for module in (cuda, accelerator):
        for name in dir(module):
            if _NUMBER.fullmatch(name) or _NOTHING.fullmatch(name):
                setattr(module, name, (lambda *args, **kwargs: 0) if _NUMBER.fullmatch(name) else _nothing)
    for name in ("is_available", "device_count", "current_stream"):
        setattr(accelerator, name, getattr(cuda, name))
    accelerator.device_index, accelerator.current_device_index = cuda.device, cuda.current_device
    accelerator.set_device_index = cuda.set_device
    accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    cuda.graphs.is_current_stream_capturing = cuda.is_current_stream_capturing
    torch.backends.cudnn.is_acceptable = lambda tensor: False
    torch.Stream, torch.Event = Stream, Event  # type: ignore[assignment, misc]
    torch.compile = _compile
    # It compiles the source of the functions that are called, and the emulated ones have another.
    torch.jit.script = lambda obj=None, *_, **__: obj
    pinning.pin_memory = lambda data, device=None: data
    _install_precision()


def _compile(model: Any = None, **kwargs: Any) -> Any:
    """Returns a module or a function that is called as it is."""
    if model is None:
        return lambda function: _compile(function, **kwargs)
    if not isinstance(model, nn.Module):
        return model
    from torch._dynamo.eval_frame import OptimizedModule

    # The weights have the prefix `_orig_mod.`, as after a compilation.
    return OptimizedModule(model, lambda function: function)  # type: ignore[arg-type]


def _install_precision() -> None:
    wrap(autocast, "__init__", _autocast)
    for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_dtype", "set_autocast_enabled"):
        wrap(torch, name, _of_device)
    torch.get_autocast_gpu_dtype = lambda: _AUTOCAST_TYPE
    # The CPU's own kernel needs a hundred times as long for 16 bits.
    library, name = torch.library.Library("aten", "IMPL"), "convolution_backward"
    original = torch.library.get_kernel(f"aten::{name}", "CPU")

    def backward(keys: Any, gradient: torch.Tensor, *args: Any) -> Any:
        """Adds in 32 bits, as a GPU does."""
        if gradient.dtype is not torch.float16:
            return original.call_boxed(keys, gradient, *args)
        # The input and the weight.
        wide = [part.float() for part in (gradient, *args[:2])]
        found = original.call_boxed(keys, *wide, *args[2:])
        return tuple(part if part is None else part.half() for part in found)

    library.impl(name, backward, "CPU", with_keyset=True)
    _libraries.append(library)


def _autocast(
    original: Callable[..., Any], self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any
) -> None:
    on_gpu = device_type == "cuda"
    dtype = _AUTOCAST_TYPE if on_gpu and dtype is None else dtype
    original(self, "cpu" if on_gpu else device_type, dtype, *args, **kwargs)


def _of_device(original: Callable[..., Any], *args: Any) -> Any:
    """Asks for autocast on the CPU instead of a GPU, which is what a call without a device means."""
    device, rest = (args[0], args[1:]) if args and isinstance(args[0], str) else ("cuda", args)
    return original("cpu" if device == "cuda" else device, *rest)
