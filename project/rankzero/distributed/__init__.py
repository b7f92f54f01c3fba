"""The processes of a run: how they start, find one another, communicate and end.

A command finds the other processes before it imports torch, which takes seconds. The modules that it needs for this do
not import torch; `tests/test_imports.py` checks this.
"""
