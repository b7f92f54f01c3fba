"""Start, signals, cores, threads and exit of a single process."""
