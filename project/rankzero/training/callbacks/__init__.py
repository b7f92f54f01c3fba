"""Callbacks: progress, throughput, checkpoints, stopping, failures."""
