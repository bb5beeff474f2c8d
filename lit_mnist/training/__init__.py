"""What every engine shares beside its loop: optimizer, schedule, precision, evaluation, checkpoint, result."""
