"""Checkpoints of any module: file format, safety check, atomic writes, the files of a run, and how runs resume."""
