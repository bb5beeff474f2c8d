"""The private parts of torch that the emulation replaces, each with the test that detects a change.

1. `factories`: the functions that make tensors on a device. `test_the_factories_of_torch_are_known`.
2. `optimized_module`: what torch.compile returns for a module. `test_an_optimized_module_calls_its_module`.
3. `LIBRARY`: the folder of torch. Calls from it are torch's own.
4. `lazy_init`, `replace_lazy_init`: what each use of CUDA calls first. `test_each_use_of_cuda_initializes_it`.
5. `DeviceContext`, `function_modes`: the device on which tensors are made. `test_a_default_device_is_known`.
6. `pin_nothing`: the thread of a DataLoader that pins batches. `test_batches_are_not_pinned`.
7. `skip_check_of_synchronized_norm`: DDP's check of the devices of SyncBatchNorm.
   `test_groups_and_synchronized_batch_norm_work_on_two_ranks`.
8. `make_wrappers_in_memory`: the tensors that wrap others, such as results of asynchronous collectives.
   `test_a_tensor_that_wraps_another_is_in_memory`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device
from torch.utils.data._utils import pin_memory as pinning
from torch.utils.weak import WeakTensorKeyDictionary

LIBRARY = str(Path(torch.__file__).parent)
DeviceContext = _device.DeviceContext
function_modes: Any = _get_current_function_mode_stack
TensorDictionary: Any = WeakTensorKeyDictionary


def factories() -> list[str]:
    """Returns the names of the functions of torch that take a device, and make a tensor on it."""
    known = {getattr(function, "__name__", "") for function in _device._device_constructors()}
    others = {f"{name}_like" for name in ("zeros", "ones", "empty", "full", "rand", "randn", "randint")}
    return sorted(name for name in known | others if callable(getattr(torch, name, None)))


def optimized_module(module: nn.Module) -> nn.Module:
    """Returns what torch.compile returns for a module, which calls the module as it is."""
    from torch._dynamo.eval_frame import OptimizedModule

    return OptimizedModule(module, lambda function: function)  # type: ignore[arg-type]


def replace_lazy_init(function: Callable[..., Any]) -> None:
    """Replaces what torch calls before it uses a GPU."""
    torch.cuda._lazy_init = function


def lazy_init() -> Callable[..., Any]:
    """Returns what torch calls before it uses a GPU."""
    return torch.cuda._lazy_init


def pin_nothing() -> None:
    """Lets a DataLoader give its batches as they are."""
    pinning.pin_memory = lambda data, device=None: data


def make_wrappers_in_memory(in_memory: Callable[[Any], Any]) -> None:
    """Makes tensors that wrap others on the device that `in_memory` returns for the one they name."""
    make: Any = torch.Tensor._make_wrapper_subclass

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return make(*args, **{**kwargs, "device": in_memory(kwargs.get("device"))})

    torch.Tensor._make_wrapper_subclass = staticmethod(wrapper)  # type: ignore[method-assign]


def skip_check_of_synchronized_norm() -> None:
    """Lets DDP wrap a SyncBatchNorm whose parameters are in the memory of the CPU."""
    nn.parallel.DistributedDataParallel._passing_sync_batchnorm_handle = lambda self, module: None  # type: ignore[method-assign]
