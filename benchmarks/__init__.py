"""The benchmark: what training costs, measured in interleaved rounds, as ratios; `python -m benchmarks`."""
