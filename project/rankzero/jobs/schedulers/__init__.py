"""Commands and states of each scheduler."""
