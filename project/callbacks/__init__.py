"""What watches a run: progress, throughput."""
