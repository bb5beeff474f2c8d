"""Keeps the user's files from the examined program, which sees its own writes."""
