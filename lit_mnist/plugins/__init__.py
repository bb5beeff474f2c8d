"""The guarantees as parts for any Lightning code."""
