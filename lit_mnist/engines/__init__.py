"""The engines, which train the same experiment in different ways. Each file reads from top to bottom."""
