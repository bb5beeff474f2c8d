"""Predictions on the test set or on images of one's own, as a table and as a image."""
