"""What the README states about speed, measured: `python -m benchmarks`."""
