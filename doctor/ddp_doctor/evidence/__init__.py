"""What the checks read: the runs of an examination, compared with each other."""
