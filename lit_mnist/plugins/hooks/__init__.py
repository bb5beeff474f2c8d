"""Which hooks a Trainer calls."""
