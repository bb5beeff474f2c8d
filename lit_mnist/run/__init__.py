"""A run on the disk and on the terminal: folder, metrics log, progress, result, timing."""
