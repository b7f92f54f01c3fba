"""The training loop: epochs, batches, one step, and the strategies that run it on one or many ranks."""
