"""Callbacks that write the run folder of a Trainer: monitor, logger, progress, checkpoints and predictions."""
