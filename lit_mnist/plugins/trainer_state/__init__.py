"""The state of a Trainer that its loops' progress leaves out, on the same and on another number of ranks."""
