"""Rankzero: what holds a run together. It knows no particular model and no particular data."""
