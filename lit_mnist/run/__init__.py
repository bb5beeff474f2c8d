"""The output of a run: run folder, metrics log, progress display, result, timing."""
