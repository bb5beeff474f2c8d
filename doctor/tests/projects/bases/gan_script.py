"""A GAN with manual optimization in a Lightning script; each step uses the parameters of one network."""

import os

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Gan(L.LightningModule):
    def __init__(self, latent=4):
        super().__init__()
        self.automatic_optimization = False
        self.latent = latent
        self.generator = nn.Sequential(nn.Linear(latent, 32), nn.ReLU(), nn.Linear(32, 16))
        self.discriminator = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        (real,) = batch
        optimizer_g, optimizer_d = self.optimizers()
        fake = self.generator(torch.randn(len(real), self.latent))

        self.toggle_optimizer(optimizer_d)
        real_loss = F.softplus(-self.discriminator(real)).mean()
        fake_loss = F.softplus(self.discriminator(fake.detach())).mean()
        optimizer_d.zero_grad()
        self.manual_backward(real_loss + fake_loss)
        optimizer_d.step()
        self.untoggle_optimizer(optimizer_d)

        self.toggle_optimizer(optimizer_g)
        loss = F.softplus(-self.discriminator(fake)).mean()
        optimizer_g.zero_grad()
        self.manual_backward(loss)
        optimizer_g.step()
        self.untoggle_optimizer(optimizer_g)
        self.log_dict({"loss_d": (real_loss + fake_loss).detach(), "loss_g": loss.detach()})

    def configure_optimizers(self):
        return (
            torch.optim.Adam(self.generator.parameters(), lr=2e-4, betas=(0.5, 0.999)),
            torch.optim.Adam(self.discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999)),
        )


def main():
    x = torch.randn(96, 16, generator=torch.Generator().manual_seed(0)).cumsum(1) / 4
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy="ddp_find_unused_parameters_true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    torch.manual_seed(1000 + trainer.global_rank)
    trainer.fit(Gan(), DataLoader(TensorDataset(x), batch_size=8, shuffle=True))


if __name__ == "__main__":
    main()
