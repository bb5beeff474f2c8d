"""One recipe a file: the same experiment on other engines.

Each has its own loop, and trains and tests. None saves, resumes or validates: it tests the weights of the last step.
"""
