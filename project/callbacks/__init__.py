"""What watches a run: progress, throughput, the learning rate, its end."""
