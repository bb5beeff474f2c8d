"""The report as text for a terminal, as a page, and for other programs."""
