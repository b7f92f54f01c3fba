"""The processes of a run: how they start, find one another, communicate and end.

A command finds the other processes before it imports torch, which takes seconds. What it uses until then imports no
torch either; `tests/test_imports.py` checks this.
"""
