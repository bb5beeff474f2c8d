"""The report of a run as a self-contained HTML page, and the tables and plots that all pages share."""
