"""Predictions on the test set or on pictures of one's own, as a table and as a picture."""
