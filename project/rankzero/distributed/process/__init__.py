"""Start, signals, limits and exit of a single process."""
