"""Measurements of training, which are logged at the logging interval."""
