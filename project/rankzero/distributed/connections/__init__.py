"""Authenticated connections between the processes of a run."""
