"""Profiles some steps of a run with torch's profiler."""
