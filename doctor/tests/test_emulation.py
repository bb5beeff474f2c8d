"""Code for GPUs runs on emulated ones, and computes what it would compute on real ones."""

import copy
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from projects.cases import cases
from torch import nn
from torch.multiprocessing import start_processes

from ddp_doctor import examine
from ddp_doctor.emulation.cuda import install
from ddp_doctor.launch.runner import device_changes
from ddp_doctor.output.terminal import report_text

PROGRAMS = {case.name: case for case in cases("gpus.txt")}
# On a busy machine, a run needs more seconds.
TIMEOUT = float(os.environ.get("DOCTOR_TIMEOUT", "60"))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def tensors_say_where_they_are() -> None:
    x = torch.zeros(3)
    assert (x.device.type, x.is_cuda, x.get_device()) == ("cpu", False, -1)
    torch.cuda.set_device(1)
    for moved in (x.cuda(), x.to("cuda"), x.to(1), x.to(torch.device("cuda", 1)), x.to(torch.zeros(1, device=1))):
        assert moved.device == (moved + 1).device == torch.device("cuda:1")
    assert torch.zeros(2, device="cuda:0", pin_memory=False).device == torch.device("cuda", 0)
    assert torch.zeros_like(x.cuda(0)).device.index == x.cuda(0).new_ones(2).device.index == 0
    assert x.cuda().cpu().device.type == "cpu"
    assert x.cuda().to(torch.float64).is_cuda
    with torch.device("cuda"):
        assert torch.ones(2).is_cuda
        assert torch.get_default_device() == torch.device("cuda:1")
    with torch.device("meta"):
        assert torch.ones(2).is_meta
    model = network().to(1)
    assert {parameter.device.index for parameter in model.parameters()} == {1}
    assert next(copy.deepcopy(model).parameters()).is_cuda


def a_transfer_copies() -> None:
    x = torch.zeros(3)
    on_gpu = x.cuda(non_blocking=True)
    on_gpu += 1
    assert x.sum() == 0
    assert on_gpu.cuda() is on_gpu
    model = network().cuda()
    kept = {name: value.cpu() for name, value in model.state_dict().items()}
    with torch.no_grad():
        next(model.parameters()).add_(1)
    assert torch.equal(kept["0.weight"], network()[0].weight)
    assert torch.zeros(3, device="cuda", requires_grad=True).to("cuda").is_leaf
    leaf = torch.zeros(3, requires_grad=True)
    (leaf.cuda() * 2).sum().backward()
    assert leaf.grad is not None


def a_gpu_has_a_generator_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout()).cuda()
    x = torch.ones(2, 4, device="cuda")

    def drawn(of_cpu: int, of_gpu: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        torch.manual_seed(of_cpu)
        torch.cuda.manual_seed(of_gpu)
        return model(x) == 0, torch.rand(8, device="cuda"), torch.rand(8)

    first, same, other = drawn(1, 2), drawn(1, 2), drawn(1, 3)
    assert all(torch.equal(one, two) for one, two in zip(first, same, strict=True))
    # What the GPU draws does not change what the CPU draws.
    assert [torch.equal(one, two) for one, two in zip(first, other, strict=True)] == [False, False, True]
    state = torch.cuda.get_rng_state()
    values = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="cuda"), values)
    assert isinstance(torch.Generator("cuda"), torch.Generator)


def what_is_compiled_is_called_as_it_is() -> None:
    model, x = network().cuda(), torch.ones(1, 4, device="cuda")
    compiled: Any = torch.compile(model, mode="max-autotune")
    assert next(iter(compiled.state_dict())) == "_orig_mod.0.weight"
    assert torch.equal(compiled(x), model(x))
    assert torch.compile(lambda value: value + 1)(1) == 2


def mixed_precision_computes_in_its_type() -> None:
    model, x = network().cuda(), torch.ones(1, 4, device="cuda")
    for context, dtype in (
        (torch.autocast("cuda"), torch.float16),
        (torch.amp.autocast("cuda", dtype=torch.bfloat16), torch.bfloat16),
        (torch.cuda.amp.autocast(), torch.float16),
        (torch.autocast("cuda", enabled=False), torch.float32),
    ):
        with context:
            assert model(x).dtype == dtype
            assert torch.is_autocast_enabled() == (dtype != torch.float32)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 1.0), torch.amp.GradScaler("cuda")
    before = copy.deepcopy(model.state_dict())
    scaler.scale(model(x).sum() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() < 2.0**16
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def streams_events_and_statistics_are_there() -> None:
    stream, begin, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    with torch.cuda.stream(stream), torch.cuda.device(1):
        x = torch.ones(3).pin_memory().cuda(non_blocking=True)
        assert torch.cuda.current_device() == x.get_device() == 1
    torch.cuda.current_stream().wait_stream(stream)
    x.record_stream(torch.cuda.current_stream())
    end.record()
    torch.cuda.synchronize()
    assert begin.elapsed_time(end) >= 0
    assert torch.cuda.get_device_properties(0).total_memory == torch.cuda.mem_get_info()[1]
    assert torch.cuda.device_count() == torch.accelerator.device_count() == 2
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert nn.LSTM(3, 4).cuda()(torch.zeros(2, 2, 3, device="cuda"))[0].is_cuda
    assert nn.DataParallel(network().cuda())(torch.ones(4, 4, device="cuda")).shape == (4, 2)


def batches_and_files_are_loaded() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(12).float().view(6, 2))
    torch.save(network().cuda().state_dict(), "weights.pt")
    for workers in (0, 2):
        loader = torch.utils.data.DataLoader(data, 2, num_workers=workers, pin_memory=True)
        assert sum(int(batch.cuda().sum()) for (batch,) in loader) == 66
    for place in ("cuda:1", {"cuda:0": "cuda:1"}, lambda storage, name: storage.cuda(1), None):
        network().load_state_dict(torch.load("weights.pt", map_location=place))


@pytest.mark.parametrize(
    "program",
    [
        tensors_say_where_they_are,
        a_transfer_copies,
        a_gpu_has_a_generator_of_its_own,
        what_is_compiled_is_called_as_it_is,
        mixed_precision_computes_in_its_type,
        streams_events_and_statistics_are_there,
        batches_and_files_are_loaded,
    ],
)
def test_it_behaves_as_on_a_gpu(program: Callable[[], None]) -> None:
    def work(_: int) -> None:
        install(2)
        program()

    start_processes(work, start_method="fork")


def collectives_of_nccl_and_synchronized_batch_norm(rank: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"file://{Path.cwd()}/store", rank=rank, world_size=2)
    install(2)
    assert all(dist.new_group(backend=name).size() == 2 for name in ("nccl", "NCCL"))
    mean = torch.tensor([float(rank)], device="cuda")
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    assert mean.item() == 0.5
    dist.barrier(device_ids=[rank])
    gathered = torch.zeros(2, 3, device="cuda")
    dist.all_gather_into_tensor(gathered, torch.full((1, 3), float(rank), device="cuda"))
    assert gathered[:, 0].tolist() == [0, 1]
    parts = [torch.zeros(1), torch.zeros(1)]
    dist.all_to_all(parts, [torch.tensor([10.0 * rank]), torch.tensor([10.0 * rank + 1])])
    assert [part.item() for part in parts] == [float(rank), 10.0 + rank]
    norm: Any = nn.SyncBatchNorm(3).cuda()
    single: Any = nn.BatchNorm1d(3)
    model = nn.parallel.DistributedDataParallel(norm, device_ids=[rank])
    whole = (torch.randn(6, 3, generator=torch.Generator().manual_seed(0)) + 5).requires_grad_()
    part = slice(3 * rank, 3 * rank + 3)
    found, expected = model(whole[part].cuda()), single(whole)
    close = functools.partial(torch.testing.assert_close, check_device=False)
    close(found, expected[part])
    close(norm.running_var, single.running_var)
    assert norm.num_batches_tracked == 1
    (found_gradient,), (gradient,) = (torch.autograd.grad(y[:, 0].square().sum(), whole) for y in (found, expected))
    close(found_gradient[part], gradient[part])
    single.eval(), norm.eval()
    close(norm(whole), single(whole))
    dist.destroy_process_group()


def test_ranks_compute_together_as_on_gpus() -> None:
    start_processes(collectives_of_nccl_and_synchronized_batch_norm, nprocs=2, start_method="fork")


@pytest.mark.parametrize(
    ("wanted", "available", "changes"),
    [
        (None, 0, {"gpus": 0, "may_emulate": True}),
        (None, 1, {"gpus": 0, "may_emulate": True}),
        (None, 2, {"real_gpus": True}),
        (False, 0, {"gpus": 0, "may_emulate": False}),
        (False, 1, {"real_gpus": True}),
        (True, 2, {"gpus": 2, "may_emulate": True}),
    ],
)
def test_the_gpus_of_a_machine_are_used_if_there_are_enough(
    wanted: bool | None, available: int, changes: dict[str, object]
) -> None:
    assert device_changes(2, wanted, available) == changes


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "options", "exit_code", "gpus", "codes"),
    [
        ("trained_on_gpus", {"only": ["structural"]}, 0, 2, []),
        ("trained_on_gpus", {"gpu_as_cpu": False}, 2, 0, []),
        ("any_device", {"only": ["structural"]}, 0, 0, []),
        ("same_noise_on_gpus", {}, 1, 2, ["LD008"]),
        ("spawned_per_gpu", {}, 1, 2, ["LD001"]),
        ("own_kernel", {}, 2, 2, []),
    ],
)
def test_a_program_for_gpus_is_examined_without_one(
    name: str, options: dict[str, Any], exit_code: int, gpus: int, codes: list[str]
) -> None:
    ranks = "2" if name == "any_device" else "gpu"
    start = [sys.executable] if name.startswith("spawned") else ["torchrun", f"--nproc-per-node={ranks}"]
    report = examine(command=[*start, str(PROGRAMS[name].path)], timeout=TIMEOUT, **options)
    found = report.exit_code, report.emulated_gpus, [finding.code for finding in report.faults]
    assert found == (exit_code, gpus, codes), report
    assert ("The program fails with emulated GPUs" in report_text(report)) == (name == "own_kernel")
