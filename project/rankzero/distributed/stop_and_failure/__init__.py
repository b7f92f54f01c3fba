"""Stops all ranks after the same step, and terminates all ranks with one reported cause when one of them fails.

Every rank has a control connection to rank zero, or to the leader of its node, in addition to the process group.
"""
