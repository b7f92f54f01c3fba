"""Checkpoints: how they are written, verified, read and kept."""
