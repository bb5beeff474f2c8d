"""Traces, timings of the parts of a step, and injected faults."""
