"""The metrics of a run: the file `metrics.jsonl`, and curves for reports and comparisons."""
