"""Progress, results and status of a run, read from its files. Does not import torch."""
