"""A tour of torch.distributed for those who learn it: each collective operation seen at work, and what it costs."""
