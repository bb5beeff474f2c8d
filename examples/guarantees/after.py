"""The same with two plugins: it resumes bit-identically, and names the rank that failed."""

from lightning.pytorch import Trainer, seed_everything
from lit_mnist.plugins import ExactCheckpoint, FailureReport
from model import Classifier, loader

seed_everything(1)
checkpoint = ExactCheckpoint("runs/mine", every_n_train_steps=10)
trainer = Trainer(max_epochs=2, accelerator="cpu", devices=2, callbacks=[checkpoint, FailureReport("runs/mine")])
trainer.fit(Classifier(), loader(), ckpt_path=checkpoint.last)
