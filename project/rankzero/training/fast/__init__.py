"""The fast path through an epoch: what it leaves out of Lightning and torch, and when it may."""
