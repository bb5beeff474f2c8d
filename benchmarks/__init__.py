"""What training costs: measured in interleaved rounds, given as ratios; `python -m benchmarks`."""
