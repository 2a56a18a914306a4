"""Training: data, the step and the loop, optimizers and schedules, checkpoints, metrics."""
