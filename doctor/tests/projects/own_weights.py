"""Programs whose ranks hold or change weights of their own; all are correct unless `EXPECTED` names a code.

Each function is a training of its own, on each rank.
"""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EXPECTED = {
    "experts_of_each_rank": ("", "", "each rank owns an expert, which DDP is told to ignore, and all use it"),
    "averages_copies": ("", "", "federated training: copies are trained, and averaged by their numbers of samples"),
    "averages_states": ("", "", "the same with batch norm, whose statistics are in the same vector as the weights"),
    "averages_from_step_9": ("", "", "local SGD, which begins after a warm-up with averaged gradients"),
    "rows_of_own_users": ("", "", "local SGD: items are averaged, and each rank owns the rows of its users"),
    "items_without_bias": ("LD009", "fault", "the same, but the bias that all ranks train is never averaged"),
    "search_of_a_rate": ("", "", "each rank trains a model of its own with another learning rate"),
    "masks_grow_alike": ("", "", "every eight steps, weights are pruned, and others grow at random from one seed"),
    "masks_of_each_rank": ("LD036", "fault", "the same with the random numbers of each rank"),
}


def start():
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    return dist.get_rank(), dist.get_world_size()


def samples(size=320):
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, x[:, :4].argmax(1))


def fit(step, epochs=2):
    data = samples()
    sampler = DistributedSampler(data)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, 8, sampler=sampler):
            step(x, y)
    dist.destroy_process_group()


class _Sum(torch.autograd.Function):
    """Adds over the ranks; the gradient of the sum is that of each part, of all ranks."""

    @staticmethod
    def forward(ctx, x):
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class _Gather(torch.autograd.Function):
    """Joins the samples of all ranks."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        ctx.size = len(x)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        return gradient[dist.get_rank() * ctx.size :][: ctx.size]


class _Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        # One per rank, from a seed of the rank.
        state = torch.get_rng_state()
        torch.manual_seed(50 + dist.get_rank())
        self.expert = nn.Linear(8, 4)
        torch.set_rng_state(state)

    def forward(self, x):
        hidden = torch.relu(self.trunk(x))
        total = _Sum.apply(self.expert(_Gather.apply(hidden)))
        return total[dist.get_rank() * len(x) :][: len(x)]


def experts_of_each_rank():
    _, world_size = start()
    net = _Experts()
    owned = [name for name, _ in net.named_parameters() if name.startswith("expert.")]
    DDP._set_params_and_buffers_to_ignore_for_model(net, owned)
    model = DDP(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.05)

    def step(x, y):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for parameter in net.expert.parameters():
            parameter.grad.div_(world_size)
        optimizer.step()

    fit(step)


def averages_copies():
    rank, world_size = start()
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x, y = samples(256).tensors
    # Rank 0 has more clients, and each has other numbers of samples.
    clients = list(zip(x.split([40, 72, 56, 88]), y.split([40, 72, 56, 88]), strict=True))[rank::world_size]
    for _ in range(4):
        total = torch.zeros(sum(parameter.numel() for parameter in model.parameters()) + 1)
        for own_x, own_y in clients:
            local = copy.deepcopy(model)
            optimizer = torch.optim.SGD(local.parameters(), 0.05)
            for part, labels in zip(own_x.split(8), own_y.split(8), strict=True):
                optimizer.zero_grad()
                F.cross_entropy(local(part), labels).backward()
                optimizer.step()
            flat = nn.utils.parameters_to_vector(local.parameters()).detach()
            total += torch.cat([flat * len(own_x), torch.tensor([float(len(own_x))])])
        weights, count = total[:-1].clone(), total[-1:].clone()
        dist.all_reduce(weights)
        dist.all_reduce(count)
        nn.utils.vector_to_parameters(weights / count, model.parameters())
    dist.destroy_process_group()


def averages_states():
    rank, world_size = start()
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    x, y = samples(256).tensors
    clients = list(zip(x.split([40, 72, 56, 88]), y.split([40, 72, 56, 88]), strict=True))[rank::world_size]
    keys = [key for key, value in model.state_dict().items() if value.is_floating_point()]
    for _ in range(4):
        total = 0
        for own_x, own_y in clients:
            local = copy.deepcopy(model)
            optimizer = torch.optim.SGD(local.parameters(), 0.05, momentum=0.9)
            for part, labels in zip(own_x.split(8), own_y.split(8), strict=True):
                optimizer.zero_grad()
                F.cross_entropy(local(part), labels).backward()
                optimizer.step()
            state = torch.cat([*(local.state_dict()[key].flatten() for key in keys), torch.ones(1)])
            total = total + len(own_x) * state.double()
        dist.all_reduce(total)
        state = model.state_dict()
        for key, mean in zip(keys, (total[:-1] / total[-1]).split([state[key].numel() for key in keys]), strict=True):
            state[key].copy_(mean.view_as(state[key]))
    dist.destroy_process_group()


class Factors(nn.Module):
    def __init__(self, users=40, items=30):
        super().__init__()
        self.user, self.item = nn.Embedding(users, 4), nn.Embedding(items, 4)
        self.bias = nn.Embedding(items, 1)

    def forward(self, user, item):
        return (self.user(user) * self.item(item)).sum(1) + self.bias(item)[:, 0]


def factorize(averaged):
    """Trains on the ratings of the rank's own users, and averages some weights after every third step."""
    rank, world_size = start()
    model = Factors()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    g = torch.Generator().manual_seed(5)
    user, item, rating = torch.randint(40, (640,), generator=g), torch.randint(30, (640,), generator=g), torch.rand(640)
    mine = user % world_size == rank
    for step in range(12):
        part = torch.randperm(int(mine.sum()), generator=torch.Generator().manual_seed(10 * step + rank))[:32]
        optimizer.zero_grad()
        (model(user[mine][part], item[mine][part]) - rating[mine][part]).square().sum().backward()
        optimizer.step()
        if step % 3 == 2:
            for parameter in averaged(model):
                dist.all_reduce(parameter.data)
                parameter.data /= world_size
    dist.destroy_process_group()


def rows_of_own_users():
    factorize(lambda model: [model.item.weight, model.bias.weight])


def items_without_bias():
    factorize(lambda model: [model.item.weight])


def search_of_a_rate():
    rank, world_size = start()
    torch.manual_seed(10 + rank)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.01 * 3**rank)
    data = samples()
    for _ in range(2):
        for x, y in DataLoader(data, 16, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    with torch.no_grad():
        loss = F.cross_entropy(model(data.tensors[0]), data.tensors[1])
    losses = [torch.zeros(()) for _ in range(world_size)]
    dist.all_gather(losses, loss)
    if not rank:
        print("best learning rate", 0.01 * 3 ** min(range(world_size), key=losses.__getitem__))
    dist.destroy_process_group()


def _masked(seed_of):
    rank, _ = start()
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    weight, steps = model.module[0].weight, []
    mask = torch.rand(weight.shape, generator=torch.Generator().manual_seed(4)) < 0.4
    generator = torch.Generator().manual_seed(seed_of(rank))

    def step(x, y):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        steps.append(1)
        with torch.no_grad():
            if len(steps) % 8 == 0:
                flat, free = mask.view(-1), (~mask).view(-1).nonzero().squeeze(1)
                on = flat.nonzero().squeeze(1)
                flat[on[weight.view(-1)[on].abs().topk(9, largest=False).indices]] = False
                flat[free[torch.randperm(len(free), generator=generator)[:9]]] = True
            weight.mul_(mask)

    fit(step)


def masks_grow_alike():
    _masked(lambda rank: 6)


def masks_of_each_rank():
    _masked(lambda rank: 6 + rank)


def averages_from_step_9():
    start()
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    ddp = DDP(model)
    optimizer, steps = torch.optim.SGD(model.parameters(), 0.05), []

    def step(x, y):
        # After a warm-up with averaged gradients, each rank trains alone between averages of the weights.
        together = len(steps) < 9
        optimizer.zero_grad()
        F.cross_entropy((ddp if together else model)(x), y).backward()
        optimizer.step()
        steps.append(1)
        if not together and len(steps) % 4 == 0:
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= dist.get_world_size()

    fit(step)
