"""Ranks: who they are, how they are started, how they meet, and what happens when one is lost."""
