"""Observes what each rank is doing: finds the cause if a run makes no progress, and ranks that slow down the others.

Each rank records what its main thread is doing (`activity.py`), and a thread reports it to rank zero (`monitor.py`).
Rank zero compares the reports of all ranks (`hangs.py`). No part of this package uses the process group.
"""
