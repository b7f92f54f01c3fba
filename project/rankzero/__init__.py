"""Rankzero: a Lightning-style trainer for one process or many. Importing it loads no torch."""

from rankzero.runs.checkpoints import from_directory

from_directory.install()
