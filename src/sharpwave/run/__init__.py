"""What surrounds a trainer: configuration, seeds, checkpoints, logs, display, evaluation and the loop."""
