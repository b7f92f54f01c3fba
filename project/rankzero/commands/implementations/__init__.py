"""Implementations of the commands, called after their flags are checked. Imports torch."""
