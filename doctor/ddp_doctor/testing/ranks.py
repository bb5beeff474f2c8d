"""Computes a function on shards of a batch: on one process, and on several ranks, which are forks with gloo."""

import copy
import os
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from numbers import Number
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, start_processes
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import vector_to_parameters

from ddp_doctor.errors import InputError
from ddp_doctor.probes.draws import Draw, RandomReplay
from ddp_doctor.probes.modules import normalize_over_ranks

# Which random numbers they are does not matter.
_SEED = 0
_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class _AskedError(BaseException):
    """The function wants to know about ranks; no `except Exception` of the user stops it."""


class _AskingGroup(dist.ProcessGroup):
    """A process group of which whatever is asked is a question about ranks."""

    def __getattribute__(self, name: str) -> Any:
        raise _AskedError


@dataclass(frozen=True)
class Case:
    """What is computed: a function, its model in 64 bits, and what makes its optimizer."""

    function: Callable[..., Any]
    model: nn.Module | None
    optimizer: Callable[..., torch.optim.Optimizer] | None


@dataclass
class Outcome:
    """What a call of the function computed.

    Attributes:
        values: The loss, as `loss`, or the numbers of a metric by their names.
        gradient: That of the loss by all trained parameters, or what the optimizer got in its first step.
        state: The weights and buffers after it.
        bits: Those of the loss.
        draws: Its random draws.
        failures: Why these could not be those of the ranks.
    """

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    gradient: torch.Tensor | None = None
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    bits: int = 64
    draws: list[Draw] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that have gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def direction(model: nn.Module) -> torch.Tensor:
    """Returns a random direction of length 1 in the space of the trained parameters."""
    count = sum(parameter.numel() for parameter in trained(model))
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return drawn / drawn.norm()


def move(bits: int) -> float:
    """Returns how far parameters are moved for the difference quotient of a loss of so many bits."""
    return 1e-4 if bits == 64 else 1e-2


def evaluate(case: Case, shard: Any, draws: Sequence[Sequence[Draw]] | None = None, *, shift: float = 0.0) -> Outcome:
    """Calls the function with copies of all that it may change.

    Args:
        case: The function.
        shard: Its samples.
        draws: Those of the ranks, which are joined and replace those of this call.
        shift: How far the parameters are moved in the `direction`.
    """
    function, model = case.function, copy.deepcopy(case.model)
    with suppress(Exception):
        # A loss may be an object with a state.
        function = copy.deepcopy(function)
    arguments, found, losses, tape = [copy.deepcopy(shard)], Outcome(), list[torch.Tensor](), RandomReplay()
    if model is not None:
        arguments.insert(0, model)
        if shift:
            weights = torch.cat([parameter.detach().flatten() for parameter in trained(model)])
            vector_to_parameters(weights + shift * direction(model), trained(model))

    def keep(*_: Any) -> None:
        if found.gradient is None and model is not None:
            own = [torch.zeros_like(part) if part.grad is None else part.grad for part in trained(model)]
            found.gradient = torch.cat([part.detach().double().flatten() for part in own])

    if model is not None and case.optimizer:
        optimizer = case.optimizer(model.parameters())
        optimizer.register_step_pre_hook(keep)
        arguments = [DistributedDataParallel(model), optimizer, arguments[1]]
    backward: Any = torch.Tensor.backward

    def see(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        losses.append(loss.detach())
        backward(loss, *args, **kwargs)

    torch.manual_seed(_SEED)
    random.seed(_SEED)
    numpy.random.seed(_SEED)
    tape.recording = True
    tape.replay(draws)
    with mock.patch.object(torch.Tensor, "backward", see), tape:
        result = function(*arguments)
        if isinstance(result, torch.Tensor) and result.requires_grad and not case.optimizer:
            if result.numel() != 1 or model is None:
                raise InputError("A loss is one number, and its model is given as `model`.")
            result.backward()
            keep()
    if losses:
        found.bits = torch.finfo(losses[0].dtype).bits
        found.values = {"loss": torch.stack([loss.double().reshape(()) for loss in losses]).sum()}
    elif case.optimizer:
        raise InputError("A step, `function(model, optimizer, batch)`, calls `backward()`; this function does not.")
    else:
        found.values = dict(_numbers(result))
    if model is not None:
        found.state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    found.draws, found.failures = tape.draws, tape.failures
    return found


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the numbers of a metric with their names."""
    if callable(compute := getattr(value, "compute", None)):
        value = compute()
    if isinstance(value, Mapping | list | tuple):
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _numbers(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, torch.Tensor | Number) or hasattr(value, "__array__"):
        yield name or "the metric", torch.as_tensor(value).detach().double()
    else:
        raise InputError(f"The function returns {value!r}, which is neither a loss nor a metric.")


@contextmanager
def conditions() -> Iterator[None]:
    """Computes in 64 bits, which autocast leaves alone, on one thread; settings and generators come back."""
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.callback(random.setstate, random.getstate())
        stack.callback(numpy.random.set_state, numpy.random.get_state())
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        # That of torch is for GPUs, and DistributedDataParallel rejects it on CPUs.
        stack.enter_context(mock.patch.object(nn.SyncBatchNorm, "forward", normalize_over_ranks))
        stack.enter_context(mock.patch.object(DistributedDataParallel, "_passing_sync_batchnorm_handle"))
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(1)
        yield


def without_ranks(compute: Callable[[], str]) -> str | None:
    """Returns what a call computes in this process, or None if it asks about ranks."""
    environment = type(os.environ)
    value_of = environment.__getitem__

    def ask(variables: Any, name: str) -> Any:
        if name in _LAUNCHED:
            raise _AskedError
        return value_of(variables, name)

    try:
        dist.group.WORLD = _AskingGroup(0, 1)
        with mock.patch.object(environment, "__getitem__", ask):
            return compute()
    except _AskedError:
        return None
    finally:
        dist.group.WORLD = None


def on_ranks(computations: Sequence[Callable[[], Any]], timeout: float) -> list[Any]:
    """Computes each on its rank, which is a fork of this process, and leaves no process behind.

    Args:
        computations: Those of the ranks.
        timeout: Seconds for each collective.

    Raises:
        AssertionError: A rank raises, ends, or waits for others that do not come.
        InputError: A rank rejects the function.
    """
    # For what hangs without a collective.
    deadline = time.monotonic() + 2 * timeout
    with tempfile.TemporaryDirectory(prefix="ddp-doctor-") as name, warnings.catch_warnings():
        # Python warns of forks where there are threads; those of torch do not outlive a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        folder = Path(name)
        context = start_processes(_serve, (computations, folder, timeout), len(computations), False, True, "fork")
        try:
            while not context.join(max(0.0, deadline - time.monotonic())):
                if time.monotonic() >= deadline:
                    raise AssertionError(f"On several ranks, the function takes more than {2 * timeout} seconds.")
        except (ProcessRaisedException, ProcessExitedException) as error:
            # The rank that waited need not be the one of this error: when it ends, others lose it.
            failures = [path.read_bytes() for path in map(Path, context.error_files) if path.exists()]
            waited = any(b"Timed out waiting" in failure for failure in failures)
            title = "LD027 A collective on one rank only" if waited else "On several ranks, the function fails"
            raise AssertionError(f"{title}: {error}") from None
        finally:
            for process in context.processes:
                process.kill()
                process.join()
        found = [torch.load(folder / str(rank), weights_only=False) for rank in range(len(computations))]
    for rejected in [result for result in found if isinstance(result, InputError)]:
        raise rejected
    return found


def _serve(rank: int, computations: Sequence[Callable[[], Any]], folder: Path, timeout: float) -> None:
    # Those of the function are seen where it is called first; those of torch must not become errors.
    warnings.simplefilter("ignore")
    ranks = len(computations)
    os.environ |= dict(zip(_LAUNCHED, map(str, (rank, rank, ranks, ranks)), strict=False))
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    dist.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=timeout), rank=rank, world_size=ranks)
    try:
        result = computations[rank]()
    except InputError as error:
        result = error
    torch.save(result, folder / f"{rank}.part")
    (folder / f"{rank}.part").rename(folder / str(rank))
    # A rank that ends closes the connections of the others; a barrier would answer a collective of theirs.
    while not all((folder / str(other)).exists() for other in range(ranks)):
        time.sleep(0.001)
