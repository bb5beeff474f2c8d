"""Trains and tests. Start it again after a kill: it resumes.

python train.py --devices 2
torchrun --nproc-per-node 2 train.py
"""

import argparse
import os

from lightning.pytorch import seed_everything
from lightning.pytorch.loggers import CSVLogger
from lit_mnist import LitTrainer
from lit_mnist.plugins import ExactCheckpoint, FailureReport

from my_project import LitData, LitModel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    launched = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # by torchrun
    parser.add_argument("--devices", type=int, default=launched, help="number of ranks on this machine")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--folder", default="runs/script", help="folder of the checkpoint and the metrics")
    parser.add_argument("--test", metavar="CKPT", help="test the weights of this file, without training")
    args = parser.parse_args()

    seed_everything(1)
    checkpoint = ExactCheckpoint(args.folder, every_n_train_steps=20)
    trainer = LitTrainer(
        devices=args.devices,
        strategy="ddp",  # on one rank as well: it then has the order of several ranks
        precision="32-true",
        max_epochs=args.epochs,
        log_every_n_steps=10,
        callbacks=[checkpoint, FailureReport(args.folder)],
        logger=CSVLogger(args.folder),
    )
    model, data = LitModel(), LitData()
    if not args.test:
        trainer.fit(model, data, ckpt_path=checkpoint.last)
    trainer.test(model, data, ckpt_path=args.test)


if __name__ == "__main__":
    main()
