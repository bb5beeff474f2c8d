"""The run's result as one self-contained HTML page."""
