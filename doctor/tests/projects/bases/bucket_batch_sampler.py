"""A batch sampler of its own that groups sentences of similar length and splits the batches over the ranks."""

import os

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler


class Sentences(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(0)
        self.lengths = torch.randint(3, 13, (size,), generator=generator).tolist()
        self.tokens = [torch.randint(1, 20, (length,), generator=generator) for length in self.lengths]

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        tokens = self.tokens[index]
        return tokens, (tokens > 10).sum() % 2


def collate(samples):
    tokens, labels = zip(*samples, strict=True)
    return pad_sequence(tokens, batch_first=True), torch.stack(labels)


class BucketBatchSampler(Sampler):
    """Yields batches of similar lengths; the ranks get different batches, and equally many."""

    def __init__(self, lengths, batch_size, rank, world_size):
        self.lengths, self.batch_size, self.epoch = lengths, batch_size, 0
        self.rank, self.world_size = rank, world_size

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        noise = torch.rand(len(self.lengths), generator=generator)
        order = (torch.tensor(self.lengths) + 2 * noise).argsort()
        batches = order.split(self.batch_size)
        shuffled = torch.randperm(len(batches), generator=generator).tolist()
        for number in shuffled[self.rank :: self.world_size]:
            yield batches[number].tolist()

    def __len__(self):
        return len(self.lengths) // self.batch_size // self.world_size


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 16, padding_idx=0)
        self.output = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))

    def train_dataloader(self):
        sentences = Sentences(96)
        self.batches = BucketBatchSampler(sentences.lengths, 8, self.trainer.global_rank, self.trainer.world_size)
        return DataLoader(sentences, batch_sampler=self.batches, collate_fn=collate)

    def on_train_epoch_start(self):
        self.batches.set_epoch(self.current_epoch)

    def training_step(self, batch, batch_idx):
        tokens, labels = batch
        mask = (tokens > 0).unsqueeze(2)
        mean = (self.embedding(tokens) * mask).sum(1) / mask.sum(1)
        return F.cross_entropy(self.output(mean), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy="ddp",
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    ).fit(Module())
