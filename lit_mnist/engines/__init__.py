"""One recipe a file: the same experiment on other engines."""
