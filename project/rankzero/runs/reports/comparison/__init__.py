"""Comparison of runs: settings, results and curves."""
