"""A run on disk: directory, attempts, lock, logs, summary, and the choice of the checkpoint to resume from."""
