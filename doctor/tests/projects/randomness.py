"""Programs whose ranks share a seed, one function each, and what the doctor says about their draws.

Equal dropout masks are a note. Draws that decide which data a rank sees are a fault, whichever generator they are from.
"""

import os
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

NOTE, FAULT = "note", "fault"
EXPECTED = {
    "dropout_and_drop_path": ("LD008", NOTE, "dropout, drop path and attention dropout from one seed"),
    "latent_noise": ("LD008", NOTE, "the noise of a VAE between its layers, from one seed"),
    "numpy_mixing_weight": ("LD008", NOTE, "one mixing weight per batch of NumPy, from one seed"),
    "numpy_in_dataset": ("LD008", FAULT, "np.random.seed(0) on all ranks, augmentation in the data set"),
    "numpy_in_workers": ("LD008", FAULT, "one seed for all ranks, augmentation in the workers"),
    "numpy_in_loop": ("LD008", FAULT, "np.random.seed(0) on all ranks, noise in the loop"),
    "python_in_dataset": ("LD008", FAULT, "random.seed(0) on all ranks, augmentation in the data set"),
    "torch_in_dataset": ("LD008", FAULT, "torch.manual_seed(0) on all ranks, augmentation in the data set"),
    "time_steps": ("LD008", FAULT, "time steps and noise of a diffusion model, in its forward pass"),
    "latents": ("LD008", FAULT, "the generator's inputs"),
    "own_generator_in_dataset": ("LD008", FAULT, "default_rng(0) of the data set on all ranks"),
    "own_generator_in_workers": ("LD008", FAULT, "default_rng(0) of the data set on all ranks, in a worker"),
    "own_generator_in_loop": ("LD008", FAULT, "default_rng(0) on all ranks, noise in the loop"),
    "python_generator_in_loop": ("LD008", FAULT, "random.Random(5) on all ranks, shifts in the loop"),
    "own_generator_mixes": ("LD008", NOTE, "one mixing weight per batch of default_rng(0)"),
    "own_generator_by_rank": ("", "", "default_rng(rank) of the data set"),
    "numpy_seeded_by_rank": ("", "", "np.random.seed(rank), augmentation in the data set"),
}


class Augmented(Dataset):
    def __init__(self, noise=lambda: 0.0):
        self.x = torch.randn(96, 16, generator=torch.Generator().manual_seed(1))
        self.noise = noise

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + self.noise(), self.x[index, :4].argmax()


def numpy_noise():
    return torch.from_numpy(np.random.normal(0, 0.1, 16).astype("float32"))


def python_noise():
    return random.gauss(0, 0.1)


def torch_noise():
    return 0.1 * torch.randn(16)


def train(model=None, dataset=None, *, seed=0, seeds=0, workers=0, loss=None):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    for function in (torch.manual_seed, np.random.seed, random.seed):
        function(seed)
    model = DDP(model() if model else nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    for function in (torch.manual_seed, np.random.seed, random.seed):
        function(seed + seeds * rank)
    dataset = dataset or Augmented()
    sampler = DistributedSampler(dataset, world_size, rank)
    # Workers that live for one epoch would begin each epoch with the state of the data set's generator.
    kept = workers > 0
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=workers, persistent_workers=kept)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loss = loss or (lambda model, x, y: F.cross_entropy(model(x), y))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss(model, x, y).backward()
            optimizer.step()
    dist.destroy_process_group()


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(16, 32), nn.Dropout(0.2), nn.Linear(32, 4)
        self.attention = nn.MultiheadAttention(32, 2, dropout=0.1, batch_first=True)

    def forward(self, x):
        h = self.drop(self.first(F.dropout(x, 0.1)).relu())
        h = h + self.attention(h[:, None], h[:, None], h[:, None], need_weights=False)[0][:, 0]
        return self.last(h * h.new_empty(len(h), 1).bernoulli_(0.9).div_(0.9))


def dropout_and_drop_path():
    train(Dropping)


class Variational(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(16, 8), nn.Linear(4, 16)

    def forward(self, x):
        mean, log_scale = self.encoder(x).chunk(2, 1)
        scale = log_scale.exp()
        return self.decoder(mean + scale * torch.randn_like(scale))


def latent_noise():
    train(Variational, loss=lambda model, x, y: F.mse_loss(model(x), x))


def numpy_mixing_weight():
    def mixed(model, x, y):
        weight = float(np.random.beta(0.4, 0.4))
        return weight * F.cross_entropy(model(weight * x + (1 - weight) * x.flip(0)), y)

    train(loss=mixed)


def numpy_in_dataset():
    train(dataset=Augmented(numpy_noise))


def numpy_in_workers():
    train(dataset=Augmented(numpy_noise), workers=1)


def python_in_dataset():
    train(dataset=Augmented(python_noise))


def torch_in_dataset():
    train(dataset=Augmented(torch_noise))


def numpy_seeded_by_rank():
    train(dataset=Augmented(numpy_noise), seeds=1)


def numpy_in_loop():
    def noisy(model, x, y):
        noise = np.random.normal(0, 0.1, x.shape).astype("float32")
        return F.cross_entropy(model(x + torch.from_numpy(noise)), y)

    train(loss=noisy)


class Diffusion(nn.Module):
    def __init__(self):
        super().__init__()
        self.times, self.net = nn.Embedding(10, 16), nn.Linear(16, 16)
        self.register_buffer("kept", torch.linspace(0.9, 0.1, 10))

    def forward(self, x):
        time, noise = torch.randint(0, 10, (len(x),)), torch.randn_like(x)
        kept = self.kept[time][:, None]
        return F.mse_loss(self.net(kept * x + (1 - kept) * noise + self.times(time)), noise)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.diffusion = Diffusion()

    def forward(self, x):
        return self.diffusion(x)


def time_steps():
    train(Inner, loss=lambda model, x, y: model(x))


def latents():
    train(lambda: nn.Linear(8, 16), loss=lambda model, x, y: F.mse_loss(model(torch.randn(len(x), 8)), x))


class OwnGenerator(Augmented):
    def __init__(self, seed):
        super().__init__()
        self.rng = np.random.default_rng(seed)

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + torch.from_numpy(self.rng.normal(0, 0.1, 16).astype("float32")), y


def own_generator_in_dataset():
    train(dataset=OwnGenerator(0))


def own_generator_in_workers():
    train(dataset=OwnGenerator(0), workers=1)


def own_generator_by_rank():
    train(dataset=OwnGenerator(int(os.environ["RANK"])))


def own_generator_in_loop():
    rng = np.random.default_rng(0)

    def noisy(model, x, y):
        noise = torch.from_numpy(rng.standard_normal(tuple(x.shape), dtype="float32"))
        return F.cross_entropy(model(x + 0.1 * noise), y)

    train(loss=noisy)


def python_generator_in_loop():
    rng = random.Random(5)

    def shifted(model, x, y):
        shifts = torch.tensor([[rng.uniform(-0.1, 0.1) for _ in range(16)] for _ in x])
        return F.cross_entropy(model(x + shifts), y)

    train(loss=shifted)


def own_generator_mixes():
    rng = np.random.default_rng(0)

    def mixed(model, x, y):
        weight = float(rng.uniform())
        return F.cross_entropy(model(weight * x + (1 - weight) * x.flip(0)), y)

    train(loss=mixed)
