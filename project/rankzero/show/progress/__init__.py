"""Progress of a run: a bar in a terminal, and plain lines at intervals elsewhere."""
