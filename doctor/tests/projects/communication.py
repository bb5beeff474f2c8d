"""Programs that communicate in other ways than DDP's own all-reduce, one function each, and faults among them.

Stock communication hooks, sharded optimizers, averaged weights, and lock files: all are correct unless `EXPECTED` names
a code. Each function is a training of its own, on each rank.
"""

import fcntl
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from filelock import FileLock
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
    _hook_then_optimizer,
    _OptimizerHookState,
)
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.optim.utils import as_functional_optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EXPECTED = {
    "hook_allreduce": ("", "the stock hook that averages as DDP does"),
    "hook_fp16": ("", "gradients compressed to float16"),
    "hook_bf16": ("", "gradients compressed to bfloat16"),
    "hook_quantized": ("", "gradients quantized to 8 bits per bucket"),
    "hook_quantized_per_channel": ("", "gradients quantized to 8 bits per channel"),
    "hook_power_sgd": ("", "PowerSGD from the third step on"),
    "hook_power_sgd_bf16": ("", "PowerSGD with bfloat16, not yet active"),
    "hook_post_local_sgd": ("", "post-local SGD: gradients of a subgroup, averaged weights"),
    "hook_with_optimizer": ("", "a functional optimizer that steps within the hook"),
    "zero_optimizer": ("", "ZeroRedundancyOptimizer: each rank steps a part of the parameters"),
    "zero_optimizer_module": ("", "ZeroRedundancyOptimizer around SGD with a schedule"),
    "periodic_averager": ("", "PeriodicModelAverager after each step, without DDP"),
    "local_sgd_by_hand": ("", "weights averaged by all_reduce at every other step"),
    "file_locks": ("", "filelock, flock and O_EXCL around files that all ranks use"),
    "hook_not_divided": ("LD014", "a float16 hook that sums and does not divide"),
    "hook_noop": ("LD009", "noop_hook, which is for measurements only, left in"),
    "hook_fp16_sum_loss": ("LD014", "a loss with reduction='sum' under a float16 hook"),
    "async_average": ("", "gradients averaged by asynchronous collectives, which the step waits for"),
    "async_loss": ("", "the sum of the loss is waited for one step later"),
    "async_not_waited": ("LD033", "gradients averaged by asynchronous collectives, which nothing waits for"),
    "biases_not_averaged": ("LD009", "gradients averaged by hand, except those of the biases"),
    "best_weights_on_rank_0": ("LD036", "rank 0 goes back to earlier weights in the middle of training"),
    "averager_without_need": ("LD009", "the averager is created, but never called"),
}


def setup():
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    return rank, world_size


def make_net():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def train(model, optimizer, *, before_step=None, after_step=None, reduction="mean", schedule=None):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = torch.randn(96, 16, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(x, x[:, :4].argmax(1))
    sampler = DistributedSampler(dataset, world_size, rank)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            if optimizer:
                optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y, reduction=reduction)
            loss.backward()
            if before_step:
                before_step(loss.detach())
            if optimizer:
                optimizer.step()
            if schedule:
                schedule.step()
            if after_step:
                after_step()
    dist.destroy_process_group()


def average(model, *, wait=True, biases=True):
    def start(_):
        begun = []
        for name, parameter in model.named_parameters():
            if biases or not name.endswith("bias"):
                parameter.grad /= dist.get_world_size()
                begun.append(dist.all_reduce(parameter.grad, async_op=True))
        for work in begun if wait else ():
            work.wait()

    return start


def sgd(model, lr=0.05):
    return torch.optim.SGD(model.parameters(), lr=lr)


def _with_stock_hook(kind):
    setup()
    model = DDP(make_net())
    register_ddp_comm_hook(kind, model)
    train(model, sgd(model))


def hook_allreduce():
    _with_stock_hook(DDPCommHookType.ALLREDUCE)


def hook_fp16():
    _with_stock_hook(DDPCommHookType.FP16_COMPRESS)


def hook_bf16():
    _with_stock_hook(DDPCommHookType.BF16_COMPRESS)


def hook_quantized():
    _with_stock_hook(DDPCommHookType.QUANTIZE_PER_TENSOR)


def hook_quantized_per_channel():
    _with_stock_hook(DDPCommHookType.QUANTIZE_PER_CHANNEL)


def hook_noop():
    _with_stock_hook(DDPCommHookType.NOOP)


def hook_power_sgd():
    setup()
    model = DDP(make_net())
    model.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2), powerSGD_hook)
    train(model, sgd(model))


def hook_power_sgd_bf16():
    setup()
    model = DDP(make_net())
    model.register_comm_hook(PowerSGDState(None), bf16_compress_wrapper(powerSGD_hook))
    train(model, sgd(model))


def hook_post_local_sgd():
    rank, world_size = setup()
    groups = [dist.new_group([number]) for number in range(world_size)]
    model = DDP(make_net())
    model.register_comm_hook(PostLocalSGDState(None, groups[rank], start_localSGD_iter=1), post_localSGD_hook)
    averager = PeriodicModelAverager(period=8, warmup_steps=1)
    train(model, PostLocalSGDOptimizer(sgd(model), averager))


def hook_with_optimizer():
    setup()
    model = DDP(make_net())
    state = _OptimizerHookState(as_functional_optim(torch.optim.SGD, lr=0.05))
    model.register_comm_hook(None, _hook_then_optimizer(allreduce_hook, state))
    train(model, None)


def zero_optimizer():
    setup()
    model = DDP(make_net())
    train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2))


def zero_optimizer_module():
    setup()
    model = DDP(make_net())
    optimizer = ZeroRedundancyOptimizer(
        # Lists, because it reads them twice: after a generator it would train nothing.
        [{"params": found} for part in model.module if (found := list(part.parameters()))],
        torch.optim.SGD,
        lr=0.1,
        momentum=0.9,
    )
    train(model, optimizer, schedule=torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))


def periodic_averager():
    setup()
    model = make_net()
    averager = PeriodicModelAverager(period=4, warmup_steps=0)
    train(model, sgd(model), after_step=lambda: averager.average_parameters(model.parameters()))


def averager_without_need():
    setup()
    model = make_net()
    PeriodicModelAverager(period=2)
    train(model, sgd(model))


def local_sgd_by_hand():
    _, world_size = setup()
    model, steps = make_net(), [0]

    def average():
        steps[0] += 1
        if steps[0] % 2 == 0:
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= world_size

    train(model, sgd(model), after_step=average)


def file_locks():
    setup()
    with FileLock("downloads.lock"):
        if not Path("data.txt").exists():
            Path("data.txt").write_text("downloaded once")
    with Path("cache.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        torch.save({"x": torch.ones(2)}, "cache.pt")
    while True:
        try:
            with Path("exclusive.lock").open("x"):
                break
        except FileExistsError:
            time.sleep(0.01)
    Path("exclusive.lock").unlink()
    dist.barrier()
    model = DDP(make_net())
    train(model, sgd(model))


def hook_not_divided():
    def summed(state, bucket):
        future = dist.all_reduce(bucket.buffer().half(), async_op=True).get_future()
        return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))

    setup()
    model = DDP(make_net())
    model.register_comm_hook(None, summed)
    train(model, sgd(model))


def hook_fp16_sum_loss():
    setup()
    model = DDP(make_net())
    model.register_comm_hook(None, fp16_compress_hook)
    train(model, sgd(model, lr=0.005), reduction="sum")


def async_average():
    setup()
    model = make_net()
    train(model, sgd(model), before_step=average(model))


def async_not_waited():
    setup()
    model = make_net()
    train(model, sgd(model), before_step=average(model, wait=False))


def biases_not_averaged():
    setup()
    model = make_net()
    train(model, sgd(model), before_step=average(model, biases=False))


def async_loss():
    setup()
    model = DDP(make_net())
    begun = []

    def add(loss):
        if begun:
            begun.pop().wait()
        begun.append(dist.all_reduce(loss, async_op=True))

    train(model, sgd(model), before_step=add)


def best_weights_on_rank_0():
    rank, _ = setup()
    model = DDP(make_net())
    kept = []

    def restore():
        kept.append({name: value.clone() for name, value in model.module.state_dict().items()})
        if rank == 0 and len(kept) == 4:
            model.module.load_state_dict(kept[1])

    train(model, sgd(model), after_step=restore)
