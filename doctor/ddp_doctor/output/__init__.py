"""The report as text for a terminal and as a page."""
