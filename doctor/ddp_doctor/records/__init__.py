"""What a run shall do, and what its ranks recorded."""
