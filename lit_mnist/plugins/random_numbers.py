"""Random numbers without hidden state, for a module or a data set whose state is a function of the step.

    from lit_mnist.plugins.random_numbers import permutation

    order = permutation(seed, "order", len(dataset), epoch)  # the same on every rank, and after any resume

Each number is a function of a seed, a purpose and counters: there is no generator to save, restore or split over ranks.
"""

from lit_mnist.distributed.rng import derive_seed, permutation, random_bits, uniform

__all__ = ["derive_seed", "permutation", "random_bits", "uniform"]
