"""What training costs: measured in interleaved rounds, given as ratios; `python train.py bench`."""
