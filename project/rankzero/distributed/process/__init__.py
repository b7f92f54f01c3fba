"""One process: how it is started, its signals, cores and threads, how it ends."""
