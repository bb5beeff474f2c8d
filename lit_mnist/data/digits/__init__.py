"""MNIST and its relatives."""
