"""Checkpoints: how they are written, when, and which one a run carries on from."""
