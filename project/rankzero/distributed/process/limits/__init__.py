"""Limits of a process (cores, CPU time, memory), and the number of threads derived from them."""
