"""The engines: the same experiment, trained by every way that people use. Each file reads top to bottom."""
