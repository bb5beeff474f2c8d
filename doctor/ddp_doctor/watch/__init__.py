"""Watches a whole training run for differences between its ranks, while it runs, without changing it.

    ddp-doctor watch -- torchrun --nproc-per-node 2 train.py

Each rank writes a few numbers to a file of its own every few steps, and the command compares the files. The ranks send
nothing to each other. If the watch fails, it stops watching, and the run continues.
"""
