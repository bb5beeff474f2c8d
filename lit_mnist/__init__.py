"""Distributed training that can be trusted, on the smallest real example there is."""

__version__ = "0.1.0"
