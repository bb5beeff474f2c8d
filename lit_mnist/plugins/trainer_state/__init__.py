"""The state of a Trainer that its loops' progress lacks, on the same and on another number of ranks."""
