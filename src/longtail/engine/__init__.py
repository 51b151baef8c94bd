"""The loop, its schedule, its checkpoints, its log and its evaluation."""
