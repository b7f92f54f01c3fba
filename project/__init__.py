"""Rankzero: what holds a run together. It knows no particular model and no particular data."""

from project.checkpoints import from_directory

from_directory.install()
