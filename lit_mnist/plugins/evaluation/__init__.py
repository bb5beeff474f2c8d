"""Evaluation that does not depend on the number of ranks: metrics, loaders and logged means."""
