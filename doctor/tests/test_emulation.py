"""Code for GPUs runs on emulated ones, and computes what it would compute on real ones."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from doctor_support import on_ranks, run_forked
from torch import nn
from torch.nn import functional as F

from ddp_doctor import Report, examine
from ddp_doctor.emulation.demand import emulation_for
from ddp_doctor.emulation.install import install
from ddp_doctor.launch.runner import device_changes
from ddp_doctor.output.page import page_of
from ddp_doctor.output.terminal import report_text
from ddp_doctor.records.run import RankRecord, Run
from ddp_doctor.records.spec import Spec, Target

PROGRAMS = Path(__file__).with_name("gpu_programs")
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
        assert moved.is_cuda
        assert moved.device == torch.device("cuda:1")
        assert (moved + 1).device == moved.device
    assert torch.zeros(2, device="cuda:0").device == torch.device("cuda", 0)
    assert torch.zeros_like(x.cuda(0)).device.index == 0
    assert x.cuda().cpu().device.type == "cpu"
    assert x.cuda().to(torch.float64).is_cuda
    with torch.device("cuda"):
        assert torch.ones(2).is_cuda
    cuda: Any = torch.cuda
    assert cuda.FloatTensor([1.0]).type() == "torch.cuda.FloatTensor"
    model = network().to(1)
    assert {parameter.device.index for parameter in model.parameters()} == {1}
    assert next(copy.deepcopy(model).parameters()).is_cuda


def a_transfer_copies() -> None:
    x = torch.zeros(3)
    on_gpu = x.cuda(non_blocking=True)
    on_gpu += 1
    assert x.sum() == 0
    best = {name: value.cpu() for name, value in network().cuda().state_dict().items()}
    model = network().cuda()
    kept = {name: value.cpu() for name, value in model.state_dict().items()}
    with torch.no_grad():
        next(model.parameters()).add_(1)
    assert all(torch.equal(kept[name], best[name]) for name in best)
    assert on_gpu.cuda() is on_gpu
    leaf = torch.zeros(3, device="cuda", requires_grad=True)
    assert leaf.to("cuda").is_leaf
    gradient = torch.zeros(3, requires_grad=True)
    (gradient.cuda() * 2).sum().backward()
    assert gradient.grad is not None


def a_gpu_has_a_generator_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout()).cuda()
    x = torch.ones(2, 4, device="cuda")

    def drawn(of_cpu: int, of_gpu: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        torch.manual_seed(of_cpu)
        torch.cuda.manual_seed(of_gpu)
        return model(x) == 0, torch.rand(8, device="cuda"), torch.rand(8)

    first, same, other = drawn(1, 2), drawn(1, 2), drawn(1, 3)
    assert all(torch.equal(one, two) for one, two in zip(first, same, strict=True))
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[1], other[1])
    # What the GPU draws does not change what the CPU draws.
    assert torch.equal(first[2], other[2])
    torch.manual_seed(1)
    assert torch.equal(torch.rand(8), first[2])
    state = torch.cuda.get_rng_state()
    values = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="cuda"), values)


def a_cuda_graph_is_rejected() -> None:
    for capture in (torch.cuda.CUDAGraph, lambda: torch.cuda.graph(None)):
        with pytest.raises(NotImplementedError, match="CUDA graphs are not emulated"):
            capture()


def a_compiled_module_keeps_its_names() -> None:
    model = network().cuda()
    compiled: Any = torch.compile(model, mode="max-autotune")
    assert next(iter(compiled.state_dict())) == "_orig_mod.0.weight"
    x = torch.ones(1, 4, device="cuda")
    assert torch.equal(compiled(x), model(x))
    assert torch.compile(lambda value: value + 1)(1) == 2


def a_scripted_function_may_create_tensors_on_a_gpu() -> None:
    scripted: Any = torch.jit.script(lambda x: x + torch.ones(2, device="cuda"))
    assert scripted(torch.zeros(2, device="cuda")).tolist() == [1, 1]


def a_convolution_in_16_bits_adds_in_32() -> None:
    x, weight = torch.randn(2, 8, 12, 12), torch.randn(4, 8, 3, 3)
    found = []
    for dtype in (torch.float16, torch.float32):
        # Both begin with values of 16 bits.
        wide = [part.half().to(dtype).requires_grad_() for part in (x, weight)]
        F.conv2d(*wide, padding=1).sum().backward()
        found.append([part.grad for part in wide])
    for narrow, exact in zip(*found, strict=True):
        assert narrow is not None
        assert exact is not None
        assert narrow.dtype is torch.float16
        assert torch.equal(narrow, exact.half())


def mixed_precision_computes_in_its_type() -> None:
    model = network().cuda()
    x = torch.ones(1, 4, device="cuda")
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
    before = [parameter.clone() for parameter in model.parameters()]
    scaler.scale(model(x).sum() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() < 2.0**16
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def optimizers_for_gpus_step() -> None:
    kinds: list[Any] = [torch.optim.Adam, torch.optim.AdamW]
    for options in ({"fused": True}, {"capturable": True}, {"foreach": True}, {}):
        for kind in kinds:
            model = network().cuda()
            before = [parameter.clone() for parameter in model.parameters()]
            optimizer = kind(model.parameters(), **options)
            model(torch.ones(1, 4, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer.step()
            assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def streams_and_events_do_nothing() -> None:
    stream, begin, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    with torch.cuda.stream(stream):
        x = torch.ones(3).pin_memory().cuda(non_blocking=True)
    torch.cuda.current_stream().wait_stream(stream)
    x.record_stream(torch.cuda.current_stream())
    end.record()
    torch.cuda.synchronize()
    assert begin.elapsed_time(end) >= 0
    assert torch.cuda.device_count() == torch.accelerator.device_count() == 2
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert nn.LSTM(3, 4).cuda()(torch.zeros(2, 2, 3, device="cuda"))[0].is_cuda
    assert nn.DataParallel(network().cuda())(torch.ones(4, 4, device="cuda")).shape == (4, 2)


def a_loader_gives_batches_of_the_cpu() -> None:
    network().cuda()
    data = torch.utils.data.TensorDataset(torch.arange(12).float().view(6, 2))
    for workers in (0, 2):
        loader = torch.utils.data.DataLoader(data, 2, num_workers=workers, pin_memory=True)
        assert sum(int(batch.cuda().sum()) for (batch,) in loader) == 66


def a_file_of_another_machine_is_loaded() -> None:
    torch.save(network().cuda().state_dict(), "weights.pt")
    for place in ("cuda:1", {"cuda:0": "cuda:1"}, lambda storage, name: storage.cuda(1), None):
        network().load_state_dict(torch.load("weights.pt", map_location=place))


@pytest.mark.parametrize(
    "program",
    [
        tensors_say_where_they_are,
        a_transfer_copies,
        a_gpu_has_a_generator_of_its_own,
        a_cuda_graph_is_rejected,
        a_compiled_module_keeps_its_names,
        a_scripted_function_may_create_tensors_on_a_gpu,
        mixed_precision_computes_in_its_type,
        a_convolution_in_16_bits_adds_in_32,
        optimizers_for_gpus_step,
        streams_and_events_do_nothing,
        a_loader_gives_batches_of_the_cpu,
        a_file_of_another_machine_is_loaded,
    ],
)
def test_it_behaves_as_on_a_gpu(program: Callable[[], None], tmp_path: Path) -> None:
    def work() -> int:
        os.chdir(tmp_path)
        install(2)
        program()
        return 0

    done = run_forked(work, tmp_path, 60)
    assert done.code == 0, done.out + done.err


def on_each_rank(_: object) -> None:
    rank = dist.get_rank()
    group: Any = dist.new_group(backend="nccl")
    assert dist.get_backend(group) == "nccl"
    assert dist.get_backend(dist.new_group(backend="NCCL")) == "nccl"
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
    whole = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)) + 5
    part = slice(0, 3) if rank == 0 else slice(3, 6)
    torch.testing.assert_close(model(whole[part].cuda()).cpu(), single(whole)[part].cpu())
    torch.testing.assert_close(norm.running_var.cpu(), single.running_var.cpu())
    assert norm.num_batches_tracked == 1


def layers_are_split(_: object) -> None:
    """Tensor parallel layers send what is asynchronous, which wraps a tensor, through the backward pass."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    whole, x = network(), torch.ones(3, 4)
    mesh = init_device_mesh("cuda", (2,))
    split = parallelize_module(network().cuda(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    split(x.cuda()).sum().backward()
    whole(x).sum().backward()
    gradient: Any = split.get_parameter("0.weight").grad
    torch.testing.assert_close(gradient.full_tensor(), whole.get_parameter("0.weight").grad)


def split_on_each_rank(rank: Any) -> None:
    install(2)
    layers_are_split(rank)


def emulated_on_each_rank(rank: Any) -> None:
    install(2)
    on_each_rank(rank)


def test_groups_and_synchronized_batch_norm_work_on_two_ranks(tmp_path: Path) -> None:
    on_ranks(emulated_on_each_rank, tmp_path, 2)


def test_layers_that_are_split_over_the_ranks_train(tmp_path: Path) -> None:
    on_ranks(split_on_each_rank, tmp_path, 2)


@pytest.mark.parametrize(
    ("files", "error", "hung", "needs"),
    [
        ((), None, False, False),
        (("gpu-asked",), "ValueError: wrong shape", False, False),
        (("gpu-needed",), "RuntimeError: no driver", False, True),
        (("gpu-asked",), "ValueError: fp16 needs a GPU", False, True),
        (("gpu-asked",), None, False, True),
        (("gpu-asked",), None, True, False),
    ],
)
def test_gpus_are_emulated_only_for_a_run_that_failed_for_want_of_one(
    files: tuple[str, ...], error: str | None, hung: bool, needs: bool, tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).touch()
    events = [{"kind": "error", "type": error.partition(":")[0], "message": error, "trace": ""}] if error else []
    spec = Spec(Target(command=("x",)), world_size=2, may_emulate=True)
    run = Run(spec, tmp_path, [RankRecord(0, [*events, {"kind": "end"}]), RankRecord(1)], hung)
    assert bool(emulation_for(spec, [run])) == needs


def test_ranks_that_train_alone_without_a_gpu_need_one(tmp_path: Path) -> None:
    (tmp_path / "gpu-asked").touch()
    spec = Spec(Target(command=("x",)), world_size=2, may_emulate=True)
    for kind in ("ddp_forward", "collective", "eval"):
        events = [
            event for step in range(3) for event in ({"kind": kind, "step": step}, {"kind": "step", "step": step})
        ]
        ranks = [RankRecord(rank, [*events, {"kind": "end"}]) for rank in range(2)]
        assert bool(emulation_for(spec, [Run(spec, tmp_path, ranks)])) == (kind == "eval")


def examined(*command: str, **options: Any) -> Report:
    return examine(command=command, timeout=TIMEOUT, **options)


def under_torchrun(name: str, **options: Any) -> Report:
    return examined("torchrun", "--nproc-per-node=gpu", str(PROGRAMS / name), **options)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_program_for_nccl_is_examined_without_a_gpu() -> None:
    report = under_torchrun("trained_on_gpus.py", only=["structural"])
    assert (report.exit_code, report.emulated_gpus) == (0, 2), report


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_program_that_also_runs_on_a_cpu_is_not_emulated() -> None:
    report = examined("torchrun", "--nproc-per-node=2", str(PROGRAMS / "any_device.py"), only=["structural"])
    assert (report.exit_code, report.emulated_gpus) == (0, 0), report


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_gpu_is_emulated_if_that_is_not_wanted() -> None:
    report = under_torchrun("trained_on_gpus.py", gpu_as_cpu=False)
    assert (report.exit_code, report.emulated_gpus) == (2, 0), report


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("name", "code"), [("same_noise_on_gpus.py", "LD008"), ("spawned_per_gpu.py", "LD001")])
def test_a_fault_of_code_for_gpus_is_found(name: str, code: str) -> None:
    report = under_torchrun(name) if code == "LD008" else examined("python", str(PROGRAMS / name))
    assert [finding.code for finding in report.faults] == [code], report
    assert report.emulated_gpus == 2


@pytest.mark.parametrize("error", ["", "RuntimeError: no kernel"])
def test_each_form_of_the_report_says_that_gpus_were_emulated(error: str) -> None:
    report = Report("train.py", 2, error=error, emulated_gpus=2)
    assert report.to_json()["emulated_gpus"] == 2
    for text in (report_text(report), page_of(report)):
        assert "2 emulated GPUs" in " ".join(text.split())
        assert ("limit of the doctor" in " ".join(text.split())) == bool(error)
    assert "emulated" not in report_text(Report("train.py", 2))


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
@pytest.mark.timeout(300)
def test_a_failure_under_the_emulation_is_called_a_limit_of_the_doctor() -> None:
    report = under_torchrun("own_kernel.py")
    assert (report.exit_code, report.emulated_gpus) == (2, 2), report
    assert "limit of the doctor" in report_text(report)
