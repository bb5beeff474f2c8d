"""The source of a program, read without running it and without an import of torch: `ddp-doctor --read`."""
