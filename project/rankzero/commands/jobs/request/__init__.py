"""Reads the command line and the site file, and combines them into a `JobRequest`."""
