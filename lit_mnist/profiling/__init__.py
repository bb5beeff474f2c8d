"""Traces, per-part timings, and injected faults."""
