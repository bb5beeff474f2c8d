"""python cli.py fit --config cli.yaml --trainer.devices=2"""

from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningCLI
from model import samples
from torch.utils.data import DataLoader
from trainer import Classifier


class Data(LightningDataModule):
    def __init__(self, batch_size: int = 4):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(samples(), batch_size=self.batch_size, shuffle=True)


if __name__ == "__main__":
    LightningCLI(Classifier, Data, save_config_callback=None)
