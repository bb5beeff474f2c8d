"""Runs the examined program on several ranks, in interpreters that fork it."""
