"""Training: the loops over epochs and batches, the optimizer step, and the strategies for one or many ranks."""
