"""Programs in plain loops that save what a resumed run needs; some lack a part of it.

Each function is a training of its own, on each rank.
"""

import copy
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EXPECTED = {
    "average_not_saved": ("LD025", "fault", "an average of the weights in a dictionary is not saved"),
    "teacher_not_saved": ("LD025", "fault", "the averaged teacher of a distillation is not saved"),
    "second_optimizer_not_saved": ("LD025", "fault", "one of two optimizers is saved"),
    "schedule_not_saved": ("LD025", "fault", "weights and optimizer are saved, without schedule and epoch"),
    "average_not_restored": ("LD025", "fault", "an average is saved, and begins again when the program resumes"),
    "schedule_not_restored": ("LD025", "fault", "a schedule is saved, and begins again when the program resumes"),
    "optimizer_restored_on_rank_0": ("LD025", "fault", "rank 0 restores the optimizer, and the others do not"),
    "epoch_repeated": ("LD025", "fault", "the epoch that was finished before the checkpoint is trained again"),
    "position_of_rank_0": (
        "LD025",
        "fault",
        "all ranks continue with rank 0's samples and recurrent state",
    ),
    "position_of_each_rank": ("", "", "the same, but each rank continues with its own"),
    "generator_of_rank_0": (
        "LD025",
        "fault",
        "all ranks continue with rank 0's generator, whose noise is data",
    ),
    "all_restored": ("", "", "a program that resumes restores all that it saves"),
    "average_saved": ("", "", "weights, optimizer, average and schedule are saved"),
    "weights_only": ("", "", "only the averaged weights are saved, at the end"),
    "best_weights_kept": ("", "", "the best weights are kept in memory, and the last ones are saved"),
    "frozen_teacher": ("", "", "a teacher that does not change is not saved"),
    "schedule_from_epoch": ("", "", "the epoch is saved, from which the schedule is computed"),
}


def train(parts, after_step=None, *, teacher=None, several=False, restore=None, next_epoch=1):
    dist.init_process_group("gloo")
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
    data = TensorDataset(x, x[:, :4].argmax(1))
    loader = DataLoader(data, 8, sampler=DistributedSampler(data))
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))
    state = {"net": net, "model": DDP(net)}
    groups = [net[0].parameters(), net[2].parameters()] if several else [net.parameters()]
    state["optimizers"] = [torch.optim.Adam(group, 0.01) for group in groups]
    state["schedule"] = torch.optim.lr_scheduler.ExponentialLR(state["optimizers"][0], 0.9)
    state["teacher"] = teacher(net) if teacher else None
    begin = 0
    if restore and Path("last.pt").exists():
        saved = torch.load("last.pt", weights_only=True)
        net.load_state_dict(saved["model"])
        restore(state, saved)
        begin = saved["epoch"] + next_epoch
    for epoch in range(begin, 3 if restore else 2):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            for optimizer in state["optimizers"]:
                optimizer.zero_grad()
            logits = state["model"](x)
            loss = F.cross_entropy(logits, y)
            if isinstance(state["teacher"], nn.Module):
                with torch.no_grad():
                    target = state["teacher"](x)
                loss = loss + F.mse_loss(logits, target)
            loss.backward()
            for optimizer in state["optimizers"]:
                optimizer.step()
            if after_step:
                after_step(state)
        state["schedule"].step()
        if dist.get_rank() == 0:
            torch.save(parts(state, epoch), "last.pt")
        dist.barrier()
    dist.destroy_process_group()


def shadow(net):
    return {name: value.clone() for name, value in net.state_dict().items()}


def follow(state):
    teacher = state["teacher"]
    target = teacher.state_dict() if isinstance(teacher, nn.Module) else teacher
    for name, value in state["net"].state_dict().items():
        target[name].lerp_(value, 0.1)


def frozen_copy(net):
    return copy.deepcopy(net).requires_grad_(False)


def _usual(state, epoch):
    return {
        "model": state["net"].state_dict(),
        "optimizer": [optimizer.state_dict() for optimizer in state["optimizers"]],
        "schedule": state["schedule"].state_dict(),
        "epoch": epoch,
    }


def average_not_saved():
    train(_usual, follow, teacher=shadow)


def teacher_not_saved():
    train(_usual, follow, teacher=frozen_copy)


def second_optimizer_not_saved():
    train(lambda state, epoch: {**_usual(state, epoch), "optimizer": state["optimizers"][0].state_dict()}, several=True)


def schedule_not_saved():
    train(lambda state, _: [state["net"].state_dict(), state["optimizers"][0].state_dict()])


def _restore(state, saved, parts=("optimizer", "schedule", "average")):
    if "optimizer" in parts:
        state["optimizers"][0].load_state_dict(saved["optimizer"][0])
    if "schedule" in parts:
        state["schedule"].load_state_dict(saved["schedule"])
    if "average" in parts:
        state["teacher"].update(saved["ema"])


def _with_average(state, epoch):
    return {**_usual(state, epoch), "ema": state["teacher"]}


def all_restored():
    train(_with_average, follow, teacher=shadow, restore=_restore)


def average_not_restored():
    def restore(state, saved):
        _restore(state, saved, ("optimizer", "schedule"))

    train(_with_average, follow, teacher=shadow, restore=restore)


def schedule_not_restored():
    def restore(state, saved):
        _restore(state, saved, ("optimizer",))
        for group in state["optimizers"][0].param_groups:
            group["lr"] = 0.01

    train(_usual, restore=restore)


def optimizer_restored_on_rank_0():
    def restore(state, saved):
        _restore(state, saved, ("optimizer", "schedule") if dist.get_rank() == 0 else ("schedule",))

    train(_usual, restore=restore)


def epoch_repeated():
    train(_usual, restore=lambda state, saved: _restore(state, saved, ("optimizer", "schedule")), next_epoch=0)


def average_saved():
    train(lambda state, epoch: {**_usual(state, epoch), "ema": state["teacher"]}, follow, teacher=shadow)


def weights_only():
    train(lambda state, _: state["teacher"], follow, teacher=shadow)


def best_weights_kept():
    def keep(state):
        state["best"] = shadow(state["net"])

    train(_usual, keep)


def frozen_teacher():
    train(_usual, teacher=frozen_copy)


def schedule_from_epoch():
    def parts(state, epoch):
        return {"net": state["net"].state_dict(), "opt": state["optimizers"][0].state_dict(), "epoch": epoch}

    train(parts)


def stream(save, restore):
    """Trains a recurrent network on windows of a text, of which each rank reads its own half; inputs get noise."""
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    text = torch.randn(dist.get_world_size() * 4, 400, 3)
    net = nn.GRU(3, 6, batch_first=True)
    model = DDP(net)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    torch.manual_seed(10 + dist.get_rank())
    rank = dist.get_rank()
    state = {"step": 0, "first": 4 * rank, "hidden": torch.zeros(1, 4, 6), "generator": torch.get_rng_state()}
    if Path("stream.pt").exists():
        saved = torch.load("stream.pt", weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state["step"] = saved["step"]
        state.update(restore(saved))
        torch.set_rng_state(state["generator"])
    while state["step"] < 32:
        begin, rows = 8 * state["step"], text[state["first"] : state["first"] + 4]
        x, y = rows[:, begin : begin + 8], rows[:, begin + 1 : begin + 9]
        found, hidden = model(x + 0.1 * torch.randn(x.shape), state["hidden"])
        optimizer.zero_grad()
        F.mse_loss(found[..., :3], y).backward()
        optimizer.step()
        state.update(step=state["step"] + 1, hidden=hidden.detach(), generator=torch.get_rng_state())
        if state["step"] % 4 == 0:
            kept = save(state)
            if rank == 0:
                usual = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": state["step"]}
                torch.save({**usual, **kept}, "stream.pt")
            dist.barrier()
    dist.destroy_process_group()


def of_all_ranks(value):
    found = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(found, value)
    return found


def of_each_rank(state):
    return {name: of_all_ranks(state[name]) for name in ("hidden", "generator")}


def own(saved):
    return {name: saved[name][dist.get_rank()] for name in ("hidden", "generator")}


def position_of_rank_0():
    def save(state):
        return {**of_each_rank(state), "hidden": state["hidden"], "first": state["first"]}

    def restore(saved):
        return {**saved, "generator": saved["generator"][dist.get_rank()]}

    stream(save, restore)


def position_of_each_rank():
    stream(of_each_rank, own)


def generator_of_rank_0():
    def save(state):
        return {**of_each_rank(state), "generator": state["generator"]}

    def restore(saved):
        return {**saved, "hidden": saved["hidden"][dist.get_rank()]}

    stream(save, restore)
