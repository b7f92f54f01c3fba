"""What a process may use: cores, CPU time and memory; the number of threads that follows."""
