"""Callbacks for progress, throughput, checkpoints, stops and failures."""
