"""The benchmark's pages."""
