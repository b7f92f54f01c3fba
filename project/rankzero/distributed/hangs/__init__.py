"""Notices that a training run makes no progress, and describes which rank is the cause and what it is doing.

Each rank records what its main thread is doing (`activity.py`), and a thread reports it to rank zero (`heartbeat.py`).
Rank zero compares the reports of all ranks (`detector.py`, `diagnosis.py`). No part of this package uses the process
group.
"""
