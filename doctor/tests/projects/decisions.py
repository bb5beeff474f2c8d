"""Programs whose ranks decide: when to stop, what to save, whether to communicate. Some let each rank decide alone.

Each function is a training of its own, on each rank.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EXPECTED = {
    "stops_by_own_loss": ("LD034", "each rank stops early by the loss of its own validation samples"),
    "patience_by_own_loss": ("LD034", "an EarlyStopping object counts the bad epochs of its own rank"),
    "best_by_own_loss": ("LD034", "rank 0 saves the best checkpoint by the loss of its own validation samples"),
    "stops_by_own_training_loss": ("LD034", "a rank leaves the loop when its own training loss is low"),
    "long_patience_by_own_loss": ("LD034", "early stopping by own losses, which stops later than the doctor looks"),
    "patience_by_reduced_loss": ("", "early stopping by the reduced loss"),
    "patience_that_reduces": ("", "the stopping object and the condition reduce the own losses themselves"),
    "raises_at_a_large_loss": ("", "a rank raises an exception if its own loss is large"),
    "gathers_hard_samples": ("LD027", "only a rank with hard samples gathers their number"),
    "barrier_after_own_improvement": ("LD027", "a barrier that only a rank with a better loss reaches"),
    "skips_steps_by_own_loss": ("LD011", "a rank skips a step if its own loss has risen"),
    "skips_steps_together": ("", "the same by the reduced loss"),
    "guard_by_own_loss": ("LD034", "a rank will skip a step if its own loss is large, which it is in no step so far"),
    "guard_by_reduced_loss": ("", "the same by the reduced loss"),
    "plateau_by_own_loss": ("LD034", "each rank reduces its learning rate by the loss of its own validation samples"),
    "plateau_by_reduced_loss": ("", "all ranks reduce the learning rate by the reduced loss"),
    "stops_by_reduced_loss": ("", "all ranks stop by the reduced loss"),
    "rank_0_decides": ("", "rank 0 decides whether to stop, and broadcasts its decision"),
    "reports_own_best": ("", "each rank prints its own best loss, and decides nothing by it"),
    "branches_in_data_set": ("", "a data set that flips samples at random, and returns early"),
}


def net():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 2))


def setting():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = torch.randn(72, 6, generator=torch.Generator().manual_seed(4))
    # The labels of the odd validation samples are noise.
    y = (x[:, 0] * x[:, 1] > 0).long()
    held_x = torch.randn(32, 6, generator=torch.Generator().manual_seed(6))
    held_y = (held_x[:, 0] * held_x[:, 1] > 0).long()
    if world_size > 1:
        held_y[1::2] = 1 - held_y[1::2]
    train = TensorDataset(x, y)
    sampler = DistributedSampler(train, world_size, rank)
    held = Subset(TensorDataset(held_x, held_y), range(rank, 32, world_size))
    return rank, DataLoader(train, 12, sampler=sampler), DataLoader(held, 8)


@torch.no_grad()
def validate(model, loader, reduced=False):
    model.eval()
    sums = torch.zeros(2)
    for x, y in loader:
        sums += torch.stack([F.cross_entropy(model(x), y, reduction="sum"), torch.tensor(float(len(y)))])
    model.train()
    if reduced:
        dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def train_epoch(model, optimizer, loader, epoch):
    loader.sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def _optimizer(model, lr=0.3):
    return torch.optim.SGD(model.parameters(), lr)


def stops_by_own_loss():
    _, loader, held = setting()
    model = DDP(net())
    optimizer = _optimizer(model)
    best = validate(model.module, held)
    for epoch in range(5):
        train_epoch(model, optimizer, loader, epoch)
        loss = validate(model.module, held)
        if loss > best:
            break
        best = loss
    dist.destroy_process_group()


def skips_steps(*, reduced):
    _, loader, _ = setting()
    model = DDP(net())
    optimizer = _optimizer(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    losses = []
    for epoch in range(4):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            losses.append(loss.detach().clone())
            if reduced:
                dist.all_reduce(losses[-1])
            if len(losses) < 4 or losses[-1] <= losses[-2]:
                optimizer.step()
            schedule.step()
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)
    dist.destroy_process_group()


def skips_steps_by_own_loss():
    skips_steps(reduced=False)


def skips_steps_together():
    skips_steps(reduced=True)


class Guard:
    def rejects(self, loss):
        return loss > 100


def guarded(*, reduced):
    _, loader, _ = setting()
    model, guard = DDP(net()), Guard()
    optimizer = _optimizer(model)
    for epoch in range(4):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            value = loss.detach().clone()
            if reduced:
                dist.all_reduce(value)
            if guard.rejects(value.item()):
                continue
            optimizer.step()
    dist.destroy_process_group()


def guard_by_own_loss():
    guarded(reduced=False)


def guard_by_reduced_loss():
    guarded(reduced=True)


def plateau(*, reduced):
    _, loader, held = setting()
    model = DDP(net())
    optimizer = _optimizer(model)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for epoch in range(4):
        train_epoch(model, optimizer, loader, epoch)
        schedule.step(validate(model.module, held, reduced))
    dist.destroy_process_group()


def plateau_by_own_loss():
    plateau(reduced=False)


def plateau_by_reduced_loss():
    plateau(reduced=True)


class EarlyStopping:
    def __init__(self, patience):
        self.best, self.bad, self.patience, self.stop = None, 0, patience, False

    def __call__(self, loss):
        if self.best is None or loss < self.best:
            self.best, self.bad = loss, 0
        else:
            self.bad += 1
            if self.bad >= self.patience:
                self.stop = True


def patience_by_own_loss():
    _, loader, held = setting()
    model = DDP(net())
    optimizer, stopping = _optimizer(model, 2.0), EarlyStopping(patience=4)
    stopping(validate(model.module, held))
    for epoch in range(20):
        train_epoch(model, optimizer, loader, epoch)
        stopping(validate(model.module, held))
        if stopping.stop:
            print("stop")
            break
    dist.destroy_process_group()


class Patience:
    def __init__(self, patience, min_delta=1e-3):
        self.patience, self.min_delta, self.best, self.bad = patience, min_delta, float("inf"), 0

    def update(self, value):
        if value < self.best - self.min_delta:
            self.best, self.bad = value, 0
        else:
            self.bad += 1
        return self.bad >= self.patience


def stops_early(*, reduced, patience):
    _, loader, held = setting()
    model = DDP(net())
    optimizer, stopper = _optimizer(model), Patience(patience)
    for epoch in range(20):
        train_epoch(model, optimizer, loader, epoch)
        loss = validate(model.module, held, reduced)
        if stopper.update(loss):
            break
    dist.destroy_process_group()


def long_patience_by_own_loss():
    stops_early(reduced=False, patience=15)


def patience_by_reduced_loss():
    stops_early(reduced=True, patience=15)


class CommonPatience(Patience):
    def update(self, value):
        return super().update(mean_of_ranks(value))


def mean_of_ranks(value):
    total = torch.tensor(value)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).item()


def patience_that_reduces():
    _, loader, held = setting()
    model = DDP(net())
    optimizer, stopper = _optimizer(model), CommonPatience(15)
    for epoch in range(20):
        train_epoch(model, optimizer, loader, epoch)
        loss = validate(model.module, held)
        if stopper.update(loss):
            break
        if mean_of_ranks(loss) < 0.01:
            return
    dist.destroy_process_group()


def raises_at_a_large_loss():
    _, loader, _ = setting()
    model = DDP(net())
    optimizer = _optimizer(model)
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            if loss.item() > 1000:
                raise ValueError("the loss is too large")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


def best_by_own_loss():
    rank, loader, held = setting()
    model = DDP(net())
    optimizer = _optimizer(model, 2.0)
    best = validate(model.module, held)
    for epoch in range(4):
        train_epoch(model, optimizer, loader, epoch)
        loss = validate(model.module, held)
        if loss < best:
            best = loss
            if rank == 0:
                torch.save(model.module.state_dict(), "best.pt")
        dist.barrier()
    dist.destroy_process_group()


def stops_by_own_training_loss():
    _, loader, _ = setting()
    model = DDP(net())
    optimizer = _optimizer(model)
    for epoch in range(8):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            if loss.item() < 0.69:
                dist.destroy_process_group()
                return
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


def gathers_hard_samples():
    _, loader, _ = setting()
    model = DDP(net())
    optimizer = _optimizer(model)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            losses = F.cross_entropy(model(x), y, reduction="none")
            optimizer.zero_grad()
            losses.mean().backward()
            optimizer.step()
            hard = (losses.detach() > 1.0).sum()
            if hard:
                dist.all_reduce(hard)
    dist.destroy_process_group()


def barrier_after_own_improvement():
    _, loader, held = setting()
    model = DDP(net())
    optimizer = _optimizer(model)
    best = validate(model.module, held)
    for epoch in range(3):
        train_epoch(model, optimizer, loader, epoch)
        loss = validate(model.module, held)
        if loss < best:
            best = loss
            dist.barrier()
    dist.destroy_process_group()


def stops_by_reduced_loss():
    _, loader, held = setting()
    model = DDP(net())
    optimizer = _optimizer(model)
    best = validate(model.module, held, reduced=True)
    for epoch in range(5):
        train_epoch(model, optimizer, loader, epoch)
        loss = validate(model.module, held, reduced=True)
        if loss > best:
            break
        best = loss
    dist.destroy_process_group()


def rank_0_decides():
    rank, loader, held = setting()
    model = DDP(net())
    optimizer = _optimizer(model)
    best = validate(model.module, held, reduced=True)
    for epoch in range(5):
        train_epoch(model, optimizer, loader, epoch)
        loss, stop = validate(model.module, held, reduced=True), torch.zeros(1)
        if rank == 0:
            if loss < best:
                best = loss
                torch.save(model.module.state_dict(), "best.pt")
            else:
                stop += 1
        dist.broadcast(stop, 0)
        if stop.item():
            break
    dist.destroy_process_group()


def reports_own_best():
    rank, loader, held = setting()
    model = DDP(net())
    optimizer = _optimizer(model)
    best = validate(model.module, held)
    for epoch in range(2):
        train_epoch(model, optimizer, loader, epoch)
        loss = validate(model.module, held)
        if loss < best:
            best = loss
            print(f"rank {rank}: best so far")
    dist.destroy_process_group()


class Flipped(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        if torch.rand(()) < 0.5:
            return x, y
        return -x, y


def branches_in_data_set():
    rank, loader, _ = setting()
    torch.manual_seed(rank)
    sampler = loader.sampler
    loader = DataLoader(Flipped(*loader.dataset.tensors), 12, sampler=sampler)
    model = DDP(net())
    torch.manual_seed(rank)
    optimizer = _optimizer(model)
    for epoch in range(2):
        train_epoch(model, optimizer, loader, epoch)
    dist.destroy_process_group()
