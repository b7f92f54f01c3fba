"""The control channel: a connection of every rank to rank zero, beside the process group."""
