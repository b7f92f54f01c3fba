"""The work of each command, after its flags are checked. Imports torch."""
