"""Exchanges values, decisions and files between all ranks."""
