"""Trains and tests, as the command `lit-mnist` does. Start it again after a kill: it resumes.

python train.py --devices 2
torchrun --nproc-per-node 2 train.py
"""

import argparse
import os
from pathlib import Path

from lightning.pytorch import seed_everything
from lit_mnist import LitTrainer

from my_project import LitData, LitModel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    launched = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # by torchrun
    parser.add_argument("--devices", type=int, default=launched, help="number of ranks on this machine")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--folder", type=Path, default=Path("runs/script"), help="folder of the run")
    parser.add_argument("--test", metavar="CKPT", help="test the weights of this file, without training")
    args = parser.parse_args()

    seed_everything(1)
    trainer = LitTrainer(
        devices=args.devices,
        precision="32-true",
        max_epochs=args.epochs,
        log_every_n_steps=10,
        default_root_dir=args.folder,
    )
    model, data = LitModel(), LitData()
    if args.test:
        trainer.test(model, data, ckpt_path=args.test)
    else:
        last = args.folder / "checkpoints" / "last.ckpt"
        trainer.train(model, data, ckpt_path=last if last.exists() else None)


if __name__ == "__main__":
    main()
