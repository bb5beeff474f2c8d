"""Checkpoints of any module: format, safety check, atomic writes, the files of a run, and the rules for resuming."""
