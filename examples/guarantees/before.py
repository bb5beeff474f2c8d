"""A stock Trainer that saves, and resumes if it is started again."""

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from model import Classifier, loader

seed_everything(1)
checkpoint = ModelCheckpoint("runs/mine", every_n_train_steps=10, save_last=True)
trainer = Trainer(max_epochs=2, accelerator="cpu", devices=2, callbacks=[checkpoint])
trainer.fit(Classifier(), loader(), ckpt_path="last")
