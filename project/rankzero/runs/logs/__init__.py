"""Logs of the ranks, and crashes in them."""
