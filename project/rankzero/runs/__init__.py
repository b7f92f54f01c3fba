"""A run on disk: its directory, attempts, lock, logs, summary, and what it resumes from."""
