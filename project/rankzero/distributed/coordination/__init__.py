"""Connects the processes of a program, and exchanges values, decisions and files between them."""
