"""A tour of torch.distributed: what each collective operation does, and what it costs."""
