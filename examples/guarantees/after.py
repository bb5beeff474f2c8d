"""The same with a plugin: it resumes bit-identically."""

from lightning.pytorch import Trainer, seed_everything
from lit_mnist.plugins import ExactCheckpoint
from model import Classifier, loader

seed_everything(1)
checkpoint = ExactCheckpoint("runs/mine", every_n_train_steps=10)
trainer = Trainer(max_epochs=2, accelerator="cpu", devices=2, callbacks=[checkpoint])
trainer.fit(Classifier(), loader(), ckpt_path=checkpoint.last)
