"""What a Trainer does in each step beside the module's own work."""
