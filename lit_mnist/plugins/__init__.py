"""Parts of the project for any Lightning code."""
