"""Verified images and labels, their order, and the random numbers that shape both."""
