"""The fast path through an epoch: which calls of Lightning and torch it skips, and under which conditions."""
