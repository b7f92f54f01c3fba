"""Checkpoints: writing, verifying, reading and deleting them."""
