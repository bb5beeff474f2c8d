"""Checkpoints: file format, safety check, atomic writes, the manager, and the rules for resuming."""
