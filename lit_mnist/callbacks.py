"""Callbacks for your training."""
