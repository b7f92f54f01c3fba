"""How all ranks stop after the same step, and end with one cause when one of them fails.

Every rank has a control connection to rank zero, in addition to the process group.
"""
