"""Training: the loop, optimizers and schedules, checkpoints, logging and evaluation."""
