"""Checkpoints: the file format, the safety check, atomic writes, and what a run may resume from."""
