"""Reports on a run: in the terminal and as a file."""
