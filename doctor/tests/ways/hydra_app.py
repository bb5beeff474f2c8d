"""python hydra_app.py trainer.devices=2"""

import hydra
import lightning as L
from model import samples
from omegaconf import DictConfig
from torch.utils.data import DataLoader
from trainer import Classifier


@hydra.main(version_base=None, config_path=".", config_name="hydra")
def main(cfg: DictConfig):
    trainer = L.Trainer(**cfg.trainer)
    trainer.fit(Classifier(), DataLoader(samples(), batch_size=cfg.batch_size, shuffle=True))


if __name__ == "__main__":
    main()
