"""One plugin each under a stock Trainer: `python -m examples.plugins.sampler`, and so on for the other files."""
