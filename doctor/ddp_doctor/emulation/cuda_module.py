"""The functions of torch.cuda and torch.accelerator, for emulated GPUs."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch

from ddp_doctor.emulation.devices import gpus, named
from ddp_doctor.emulation.generators import gpu_generator
from ddp_doctor.emulation.streams import CudaGraph, DeviceContext, Event, Stream, StreamContext
from ddp_doctor.emulation.torch_internals import replace_lazy_init

_MEMORY = 80 * 1024**3
_PROPERTIES = SimpleNamespace(
    name="Emulated GPU",
    total_memory=_MEMORY,
    major=8,
    minor=0,
    multi_processor_count=108,
    warp_size=32,
    L2_cache_size=40 * 1024**2,
    max_threads_per_multi_processor=2048,
    shared_memory_per_block=48 * 1024,
    shared_memory_per_block_optin=163 * 1024,
    regs_per_multiprocessor=65536,
    is_integrated=0,
    is_multi_gpu_board=0,
    gcnArchName="",
    uuid="",
)
_NUMBERS = (
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "memory_cached",
    "max_memory_cached",
    "utilization",
    "temperature",
    "power_draw",
    "clock_rate",
    "memory_usage",
)
_NOTHING = (
    "init",
    "synchronize",
    "empty_cache",
    "ipc_collect",
    "reset_peak_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_accumulated_memory_stats",
    "set_per_process_memory_fraction",
    "set_stream",
    "set_sync_debug_mode",
)


def install_cuda() -> None:
    """Replaces the functions that describe and control GPUs."""
    cuda: Any = torch.cuda
    replace_lazy_init(lambda: None)
    stream = Stream()
    values = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "is_tf32_supported": True,
        "can_device_access_peer": True,
        "get_device_name": _PROPERTIES.name,
        "get_device_capability": (_PROPERTIES.major, _PROPERTIES.minor),
        "get_device_properties": _PROPERTIES,
        "get_arch_list": ["sm_80"],
        "mem_get_info": (_MEMORY, _MEMORY),
        "memory_stats": {},
        "memory_snapshot": [],
        "memory_summary": "",
        "current_stream": stream,
        "default_stream": stream,
        "get_sync_debug_mode": 0,
        **dict.fromkeys(_NUMBERS, 0),
        **dict.fromkeys(_NOTHING),
    }
    for name, value in values.items():
        _put(cuda, name, lambda *args, _value=value, **kwargs: _value)
    for name, function in _FUNCTIONS.items():
        _put(cuda, name, function)
    for name, kind in (("Event", Event), ("Stream", Stream), ("ExternalStream", Stream), ("stream", StreamContext)):
        setattr(cuda, name, kind)
    cuda.StreamContext, cuda.device, cuda.device_of = StreamContext, DeviceContext, DeviceContext
    cuda.CUDAGraph = cuda.graph = CudaGraph
    for module in (cuda.graphs, cuda):
        _put(module, "is_current_stream_capturing", lambda: False)
        # A replay is a call.
        _put(module, "make_graphed_callables", lambda callables, *args, **kwargs: callables)
    _put(torch.backends.cudnn, "is_acceptable", lambda tensor: False)
    torch.Stream, torch.Event = Stream, Event  # type: ignore[assignment, misc]
    _install_accelerator(stream)


def _install_accelerator(stream: Stream) -> None:
    accelerator: Any = torch.accelerator
    _put(accelerator, "is_available", lambda: True)
    _put(accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    for name in ("current_stream", "default_stream"):
        _put(accelerator, name, lambda *args, **kwargs: stream)
    for name in ("synchronize", "set_stream", "empty_cache", "reset_peak_memory_stats"):
        _put(accelerator, name, lambda *args, **kwargs: None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        _put(accelerator, name, lambda *args, **kwargs: 0)
    _put(accelerator, "device_count", _FUNCTIONS["device_count"])
    for name in ("set_device_index", "set_device_idx"):
        _put(accelerator, name, _set_device)
    for name in ("current_device_index", "current_device_idx"):
        _put(accelerator, name, _FUNCTIONS["current_device"])
    accelerator.device_index = DeviceContext


def _set_device(device: Any) -> None:
    found = named(device)
    if found is not None and found.index is not None:
        gpus.current = found.index


def _set_states(states: Any) -> None:
    for state in list(states)[:1]:
        gpu_generator.set_state(state)


_FUNCTIONS: dict[str, Any] = {
    "device_count": lambda: gpus.count,
    "current_device": lambda: gpus.current,
    "set_device": _set_device,
    "manual_seed": gpu_generator.seed,
    "manual_seed_all": gpu_generator.seed,
    "seed": lambda: gpu_generator.seed(torch.default_generator.initial_seed()),
    "seed_all": lambda: gpu_generator.seed(torch.default_generator.initial_seed()),
    "initial_seed": gpu_generator.initial_seed,
    "get_rng_state": lambda device="cuda": gpu_generator.state(),
    "get_rng_state_all": lambda: [gpu_generator.state() for _ in range(gpus.count)],
    "set_rng_state": lambda new_state, device="cuda": gpu_generator.set_state(new_state),
    "set_rng_state_all": _set_states,
}


def _put(module: Any, name: str, function: Any) -> None:
    """Sets a function under the name and the documentation of the one that it replaces."""
    original = getattr(module, name, None)

    @functools.wraps(original or function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    setattr(module, name, call)
