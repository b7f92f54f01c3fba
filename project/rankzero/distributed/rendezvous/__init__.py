"""Finds all processes of a run and connects them, before torch is imported."""
