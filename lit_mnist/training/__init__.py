"""What all training loops share: the job of a rank, optimizer, schedule, loss, precision and evaluation."""
