"""The comparison of engines: who trained the same, what each costs, and what each does for its user."""
