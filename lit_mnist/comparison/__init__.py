"""The comparison of engines: which of them train the same, and what each costs."""
