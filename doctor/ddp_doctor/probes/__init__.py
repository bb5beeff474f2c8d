"""Probes that observe a training run: hooks and wrappers around torch, installed before the user's code runs.

They add no collective. They shorten the epochs, and change values only where a run asks for it: 64 bits, recorded
batches and draws, or a fix that is tried.
"""
