"""The functions of torch.cuda and torch.accelerator, for emulated GPUs."""

from __future__ import annotations

import functools
import re
from types import SimpleNamespace
from typing import Any

import torch

from ddp_doctor.emulation.devices import gpus, named
from ddp_doctor.emulation.generators import gpu_generator
from ddp_doctor.emulation.streams import CudaGraph, DeviceContext, Event, Stream, StreamContext
from ddp_doctor.emulation.torch_internals import replace_lazy_init

_MEMORY = 80 * 1024**3
_PROPERTIES = SimpleNamespace(
    **{"name": "Emulated GPU", "uuid": "", "gcnArchName": "", "major": 8, "minor": 0, "total_memory": _MEMORY},
    **{"multi_processor_count": 108, "max_threads_per_multi_processor": 2048, "regs_per_multiprocessor": 65536},
    **{"shared_memory_per_block": 48 * 1024, "shared_memory_per_block_optin": 163 * 1024, "warp_size": 32},
    **{"L2_cache_size": 40 * 1024**2, "is_integrated": 0, "is_multi_gpu_board": 0},
)
# Functions that return 0, and those that do nothing.
_NUMBER = re.compile(
    r"(max_)?memory_(allocated|reserved|cached)|utilization|temperature|power_draw|clock_rate|memory_usage"
)
_NOTHING = re.compile(
    r"init|synchronize|empty_cache|ipc_collect|reset_.*|set_(stream|per_process_memory_fraction|sync_debug_mode)"
)


def install_cuda() -> None:
    """Replaces the functions that describe and control GPUs."""
    cuda: Any = torch.cuda
    accelerator: Any = torch.accelerator
    replace_lazy_init(lambda: None)
    stream = Stream()
    values = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "is_tf32_supported": True,
        "is_current_stream_capturing": False,
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
    }
    for name, value in values.items():
        _put(cuda, name, lambda *args, _value=value, **kwargs: _value)
    for name, function in _FUNCTIONS.items():
        _put(cuda, name, function)
    for module in (cuda, accelerator):
        for name in dir(module):
            if _NUMBER.fullmatch(name) or _NOTHING.fullmatch(name):
                number = 0 if _NUMBER.fullmatch(name) else None
                _put(module, name, lambda *args, _number=number, **kwargs: _number)
    cuda.Event, cuda.Stream, cuda.ExternalStream, cuda.stream = Event, Stream, Stream, StreamContext
    cuda.StreamContext, cuda.device, cuda.device_of = StreamContext, DeviceContext, DeviceContext
    cuda.CUDAGraph = cuda.graph = CudaGraph
    _put(cuda.graphs, "is_current_stream_capturing", lambda: False)
    for module in (cuda.graphs, cuda):
        # A replay is a call.
        _put(module, "make_graphed_callables", lambda callables, *args, **kwargs: callables)
    _put(torch.backends.cudnn, "is_acceptable", lambda tensor: False)
    torch.Stream, torch.Event = Stream, Event  # type: ignore[assignment, misc]
    _put(accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    for name in ("is_available", "current_stream", "device_count"):
        _put(accelerator, name, getattr(cuda, name))
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
