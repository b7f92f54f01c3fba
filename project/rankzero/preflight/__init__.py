"""Checks before a run: whether all processes can train together, and how fast they communicate.

Each module contains the checks of one topic. All ranks call each check, and all ranks return the same `Check`.
"""
