"""A small network and data for the programs of this folder."""

import torch
from torch import nn
from torch.utils.data import TensorDataset


def build():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 5))


def samples(count=96):
    generator = torch.Generator().manual_seed(11)
    features = torch.randn(count, 12, generator=generator)
    return TensorDataset(features, (features[:, :5].argmax(1) + features[:, 5].gt(1).long()) % 5)
